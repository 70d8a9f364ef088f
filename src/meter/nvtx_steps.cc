#include "meter/nvtx_steps.h"

#include <algorithm>

namespace halfwire::meter {
namespace {

constexpr std::array<const char*, 4> kUsualNames = {"iteration", "step", "train_step", "ProfilerStep"};

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Nothing, or a number behind what people put before one.
bool isNumber(std::string_view text) {
  if (text.empty()) return true;
  const size_t at = text.find_first_not_of(" _:#");
  if (at == std::string_view::npos) return false;
  text.remove_prefix(at);
  return text.size() <= 20 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool begins(std::string_view text, std::string_view name, bool any_case) {
  return text.size() >= name.size() &&
         std::equal(name.begin(), name.end(), text.begin(),
                    [&](char a, char b) { return any_case ? lower(a) == lower(b) : a == b; });
}

}  // namespace

bool isRangeName(std::string_view name) {
  return !name.empty() && name.size() <= kMostRangeName && name.front() != ' ' && name.back() != ' ' &&
         std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

StepRanges::StepRanges(std::string_view wanted) : usual_(wanted.empty()) {
  if (isRangeName(wanted)) std::copy(wanted.begin(), wanted.end(), wanted_.begin());
}

const char* StepRanges::nameOf(std::string_view text) const {
  const auto is = [&](std::string_view name) {
    return !name.empty() && begins(text, name, usual_) && isNumber(text.substr(name.size()));
  };
  if (!usual_) return is(wanted_.data()) ? wanted_.data() : nullptr;
  const auto found = std::find_if(kUsualNames.begin(), kUsualNames.end(), is);
  return found != kUsualNames.end() ? *found : nullptr;
}

const char* StepRanges::nameOfHandle(const void* handle) const {
  if (!usual_) return handle == wanted_.data() ? wanted_.data() : nullptr;
  const auto found = std::find(kUsualNames.begin(), kUsualNames.end(), handle);
  return found != kUsualNames.end() ? *found : nullptr;
}

}  // namespace halfwire::meter
