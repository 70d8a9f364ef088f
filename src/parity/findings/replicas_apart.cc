// replicas-apart: ranks that should hold the same parameters do not.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

// How far apart two ranks' samples are, relative to their norm. Sums see what norms do not and the reverse.
double distance(const RankRecord& a, size_t i, const RankRecord& b, size_t j) {
  double most = 0;
  for (size_t g = 0; g < std::min(a.groups.size(), b.groups.size()); ++g) {
    const double norm = a.groups[g].param_norm[i];
    if (!(norm > 0)) continue;
    const double norms = std::fabs(norm - static_cast<double>(b.groups[g].param_norm[j])) / norm;
    const double sums = std::fabs(a.groups[g].param_sum[i] - b.groups[g].param_sum[j]) / norm;
    if (norms > most) most = norms;
    if (sums > most) most = sums;
  }
  return most;
}

}  // namespace

void findReplicasApart(const Subject& s, Findings* out) {
  const Run& run = *s.run;
  if (run.ranks.size() < 2 || sharded(run)) return;
  const RankRecord& first = run.ranks.front();
  // Replicas that meet only now and then (local SGD) are apart in between on purpose.
  if (first.header.reduced && !*first.header.reduced) return;
  std::optional<uint32_t> since;
  int64_t rank = 0;
  size_t apart = 0, compared = 0, last_in_a_row = 0;
  double at_first = 0, at_last = 0;
  for (size_t row = 0; row < first.rows(); ++row) {
    bool any = false, differ = false;
    double most = 0;
    for (size_t r = 1; r < run.ranks.size(); ++r) {
      const RankRecord& other = run.ranks[r];
      if (other.header.elements && first.header.elements && *other.header.elements != *first.header.elements)
        return;
      const auto at = other.row(first.step[row]);
      if (!at) continue;
      for (size_t g = 0; g < std::min(first.groups.size(), other.groups.size()); ++g) {
        const uint64_t x = first.groups[g].param_hash[row], y = other.groups[g].param_hash[*at];
        if (x == kNoHash || y == kNoHash) continue;
        any = true;
        if (x == y) continue;
        if (!differ && !since) rank = other.header.rank;
        differ = true;
      }
      if (differ) most = std::max(most, distance(first, row, other, *at));
    }
    if (!any) continue;
    ++compared;
    last_in_a_row = differ ? last_in_a_row + 1 : 0;
    if (!differ) continue;
    ++apart;
    if (!since) {
      since = first.step[row];
      at_first = most;
    }
    at_last = most;
  }
  if (!since) return;
  const bool stated = gradientsAreShared(run);
  const bool lasts = last_in_a_row >= std::min<size_t>(3, compared);
  Finding f{"replicas-apart", stated && lasts && at_last > 1e-6 ? Severity::kHard : Severity::kWarning,
            s.label, *since, rank};
  f.evidence = fmt::format(
      "parameters of the ranks differ in their bits at {} of {} steps; their distance is {:.2g} of the norm "
      "at step {} and {:.2g} "
      "at the last",
      apart, compared, at_first, *since, at_last);
  f.cause = *since == first.step.front() ? "replicas start apart (parameters not broadcast, seeds by rank), "
                                           "or gradients are not the same on all ranks"
                                         : "an update that differs by rank: gradients not reduced, rounding "
                                           "or randomness by rank, a step that one rank "
                                           "skipped";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
