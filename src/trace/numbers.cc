#include "trace/numbers.h"

#include <charconv>
#include <cmath>

namespace halfwire::trace {

std::string_view unquoted(std::string_view token) {
  while (!token.empty() && static_cast<unsigned char>(token.back()) <= ' ') token.remove_suffix(1);
  if (token.size() >= 2 && token.front() == '"' && token.back() == '"')
    return token.substr(1, token.size() - 2);
  return token;
}

NumberError parseMicroseconds(std::string_view token, int64_t* ns) {
  token = unquoted(token);
  const std::string_view whole = token;
  bool negative = false;
  if (!token.empty() && token.front() == '-') {
    negative = true;
    token.remove_prefix(1);
  }
  const char* p = token.data();
  const char* const end = p + token.size();
  uint64_t us = 0;
  const char* const digits = p;
  while (p != end && *p >= '0' && *p <= '9' && p - digits < 18)
    us = us * 10 + static_cast<uint64_t>(*p++ - '0');
  bool plain = p != digits;
  uint64_t fraction = 0;
  if (plain && p != end && *p == '.') {
    ++p;
    uint64_t scale = 100;
    bool round_up = false;
    for (int i = 0; p != end && *p >= '0' && *p <= '9'; ++p, ++i) {
      if (i < 3) {
        fraction += static_cast<uint64_t>(*p - '0') * scale;
        scale /= 10;
      } else if (i == 3) {
        round_up = *p >= '5';
      }
    }
    fraction += round_up ? 1 : 0;
  }
  plain = plain && p == end;
  if (plain) {
    if (us > static_cast<uint64_t>(kMaxTimeNs) / 1000) return NumberError::kOutOfRange;
    const auto value = static_cast<int64_t>(us * 1000 + fraction);
    *ns = negative ? -value : value;
    return NumberError::kNone;
  }
  double value = 0;
  const auto [stop, error] = std::from_chars(whole.data(), whole.data() + whole.size(), value);
  if (error == std::errc::result_out_of_range) return NumberError::kOutOfRange;
  if (error != std::errc() || stop != whole.data() + whole.size() || std::isnan(value))
    return NumberError::kNotANumber;
  value *= 1000.0;
  if (!(std::fabs(value) <= static_cast<double>(kMaxTimeNs))) return NumberError::kOutOfRange;
  *ns = std::llround(value);
  return NumberError::kNone;
}

bool parseLooseInteger(std::string_view token, int64_t* value) {
  token = unquoted(token);
  constexpr std::string_view kStream = "stream ";
  if (token.substr(0, kStream.size()) == kStream) token.remove_prefix(kStream.size());
  if (token.empty()) return false;
  const char* const end = token.data() + token.size();
  const auto whole = [&](const char* stop) {
    if (stop == end) return true;
    if (*stop != '.') return false;
    for (++stop; stop != end; ++stop) {
      if (*stop != '0') return false;
    }
    return true;
  };
  int64_t number = 0;
  if (const auto [stop, error] = std::from_chars(token.data(), end, number);
      error == std::errc() && whole(stop)) {
    *value = number;
    return true;
  }
  uint64_t big = 0;
  if (const auto [stop, error] = std::from_chars(token.data(), end, big);
      error == std::errc() && whole(stop)) {
    *value = static_cast<int64_t>(big);
    return true;
  }
  return false;
}

}  // namespace halfwire::trace
