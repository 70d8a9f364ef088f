// gradients-not-reduced: ranks that should share their gradients do not.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"
#include "parity/statistics.h"

namespace halfwire::parity {

void findGradientsNotReduced(const Subject& s, Findings* out) {
  const Run& run = *s.run;
  if (run.ranks.size() < 2 || !gradientsAreShared(run) || sharded(run)) return;
  const RankRecord& first = run.ranks.front();
  for (const RankRecord& rank : run.ranks) {
    // Ranks of a pipeline hold different parameters.
    if (rank.header.elements && first.header.elements && *rank.header.elements != *first.header.elements)
      return;
  }
  std::vector<double> spreads;
  size_t bits_apart = 0, hashed = 0;
  std::optional<uint32_t> first_spread, first_bits;
  int64_t spread_rank = 0, bits_rank = 0;
  for (size_t row = 0; row < first.rows(); ++row) {
    if (skippedOrBad(first, row)) continue;
    const uint32_t step = first.step[row];
    double spread = kAbsent;
    bool apart = false, any_hash = false;
    for (size_t r = 1; r < run.ranks.size(); ++r) {
      const RankRecord& other = run.ranks[r];
      const auto at = other.row(step);
      if (!at) continue;
      for (size_t g = 0; g < std::min(first.groups.size(), other.groups.size()); ++g) {
        const double a = first.groups[g].grad_norm[row], b = other.groups[g].grad_norm[*at];
        if (std::isfinite(a) && std::isfinite(b) && std::max(a, b) > 0) {
          const double d = std::fabs(a - b) / std::max(a, b);
          if (!(d <= spread)) spread = d;
          if (d > 0.01 && !first_spread) {
            first_spread = step;
            spread_rank = other.header.rank;
          }
        }
        const uint64_t x = first.groups[g].grad_hash[row], y = other.groups[g].grad_hash[*at];
        if (x == kNoHash || y == kNoHash) continue;
        any_hash = true;
        if (x != y) {
          apart = true;
          if (!first_bits) {
            first_bits = step;
            bits_rank = other.header.rank;
          }
        }
      }
    }
    if (!std::isnan(spread)) spreads.push_back(spread);
    hashed += any_hash;
    bits_apart += apart;
  }
  if (!spreads.empty() && first_spread) {
    size_t past = 0;
    for (const double d : spreads) past += d > 0.01;
    // Half of all steps: a step here and there is a scaler's or a recorder's.
    const bool hard = 2 * past > spreads.size();
    Finding f{"gradients-not-reduced", hard ? Severity::kHard : Severity::kWarning, s.label, *first_spread,
              spread_rank};
    f.evidence = fmt::format(
        "gradient norms of the ranks differ by more than 1 % at {} of {} steps (half of the steps by more "
        "than {:.2g} %)",
        past, spreads.size(), 100 * median(spreads));
    f.cause =
        "gradients are not reduced: a forward outside of the wrapper, no_sync around the backward that "
        "should reduce, or a "
        "process group of one rank";
    out->push_back(std::move(f));
    return;
  }
  if (hashed == 0 || 2 * bits_apart <= hashed) return;
  Finding f{"gradients-not-reduced", Severity::kWarning, s.label, *first_bits, bits_rank};
  f.evidence = fmt::format(
      "the gradients' bits differ between ranks at {} of {} steps, their norms by no more than 1 %{}",
      bits_apart, hashed,
      spreads.empty() ? " as far as recorded" : fmt::format(" (median {:.2g} %)", 100 * median(spreads)));
  f.cause = "a small part of the gradients is not reduced, or the reduction gives ranks different bits";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
