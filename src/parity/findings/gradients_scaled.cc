// gradients-scaled: gradient norms that are a constant multiple of the baseline's.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"
#include "parity/statistics.h"

namespace halfwire::parity {
namespace {

// The batches of a step are equal on every rank of both runs.
bool sameBatches(const Run& a, const Run& b, uint32_t step) {
  if (a.ranks.size() != b.ranks.size()) return false;
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    const auto i = a.ranks[r].row(step), j = b.ranks[r].row(step);
    if (!i || !j || a.ranks[r].batch_hash[*i] == kNoHash) return false;
    if (a.ranks[r].batch_hash[*i] != b.ranks[r].batch_hash[*j]) return false;
  }
  return true;
}

// What a factor is called in these runs; empty where nothing has this size.
std::string nameOf(double factor, const Header& baseline, const Header& candidate) {
  const auto is = [&](double v) { return v > 1 && std::fabs(factor / v - 1) < 0.1; };
  for (const Header* h : {&candidate, &baseline}) {
    const double world = static_cast<double>(h->world_size);
    const double steps = static_cast<double>(h->accumulation.value_or(1));
    if (is(steps) && is(world)) return "the number of ranks and of accumulated micro-batches";
    if (is(world)) return "the number of ranks";
    if (is(steps)) return "the number of accumulated micro-batches";
    if (is(world * steps)) return "the number of ranks times that of accumulated micro-batches";
  }
  return "";
}

}  // namespace

void findGradientsScaled(const Subject& baseline, const Subject& candidate, Findings* out) {
  const RankRecord& b = baseline.run->ranks.front();
  const RankRecord& c = candidate.run->ranks.front();
  constexpr size_t kMost = 100;
  std::vector<double> ratios;
  size_t paired = 0;
  std::optional<uint32_t> first;
  for (size_t row = 0; row < c.rows() && ratios.size() < kMost; ++row) {
    if (skippedOrBad(c, row)) continue;
    const uint32_t step = c.step[row];
    const double x = joinedNorm(*baseline.run, step, &Group::grad_norm);
    const double y = joinedNorm(*candidate.run, step, &Group::grad_norm);
    if (!(x > 0) || !(y > 0) || std::isinf(x) || std::isinf(y)) continue;
    if (!first) first = step;
    if (paired == ratios.size() && sameBatches(*baseline.run, *candidate.run, step)) ++paired;
    ratios.push_back(std::log(y / x));
  }
  if (ratios.empty()) return;
  // With equal batches the first steps tell: parameters are still nearly those of the start. Otherwise norms
  // of different batches and parameters are compared, and only a large factor that holds throughout counts.
  double log_factor = 0;
  bool close = false;
  if (paired >= 3) {
    const std::span<const double> start = std::span(ratios).first(std::min<size_t>(paired, 5));
    log_factor = median(start);
    close = std::fabs(log_factor) > std::log(1.05);
    for (const double r : start) close = close && std::fabs(r - log_factor) < 0.25 * std::fabs(log_factor);
  } else if (ratios.size() >= 10) {
    log_factor = median(ratios);
    std::vector<double> sorted = ratios;
    std::sort(sorted.begin(), sorted.end());
    const double low = sorted[sorted.size() / 10], high = sorted[sorted.size() - 1 - sorted.size() / 10];
    close = std::fabs(log_factor) > std::log(1.7) && low * high > 0 &&
            std::min(std::fabs(low), std::fabs(high)) > std::log(1.3);
  }
  if (!close) return;
  const double factor = std::exp(std::fabs(log_factor));
  const std::string name = nameOf(factor, b.header, c.header);
  const double whole = std::round(factor);
  const bool near_whole = whole >= 2 && std::fabs(factor / whole - 1) < (paired >= 3 ? 0.02 : 0.1);
  // A change of the batch changes the noise in the norms, by no fixed factor.
  const bool hard = paired >= 3 ? near_whole || !name.empty() : !name.empty();
  Finding f{"gradients-scaled", hard ? Severity::kHard : Severity::kWarning, candidate.label, first,
            c.header.rank};
  f.evidence = fmt::format(
      "gradient norms before clipping are {} {:.4g} times the baseline's over {} steps with {} batches",
      log_factor > 0 ? "" : "1 /", factor, paired >= 3 ? std::min<size_t>(paired, 5) : ratios.size(),
      paired >= 3 ? "equal" : "different");
  if (name.empty()) {
    f.cause =
        "the loss or the gradients are multiplied by a constant, averaged over another number of samples, or "
        "rounded toward zero";
  } else {
    f.cause = "near " + name + ": gradients summed where they should be averaged, or averaged twice";
  }
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
