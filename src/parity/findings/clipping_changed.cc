// clipping-changed: the norm to which gradients are clipped is not the baseline's.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"
#include "parity/statistics.h"

namespace halfwire::parity {
namespace {

// The largest norm that clipping lets through, seen from the steps it acted on.
struct Clipping {
  size_t steps = 0;    // with both norms
  size_t clipped = 0;  // of these
  double norm = kAbsent;
  bool hidden = false;    // the recorder saw gradients that were clipped already
  bool constant = false;  // all clipped steps have that norm
  double largest_unclipped = 0;
  uint32_t first = 0;
};

Clipping clippingOf(const Run& run) {
  Clipping c;
  std::vector<double> norms, befores;
  const RankRecord& rank = run.ranks.front();
  for (size_t row = 0; row < rank.rows(); ++row) {
    const double before = joinedNorm(run, rank.step[row], &Group::grad_norm);
    const double after = joinedNorm(run, rank.step[row], &Group::grad_norm_clipped);
    if (!std::isfinite(before) || !std::isfinite(after) || skippedOrBad(rank, row)) continue;
    ++c.steps;
    if (before > 0) befores.push_back(before);
    // Norms are kept in 24 bits.
    if (after < before * (1 - 1e-4)) {
      if (c.clipped++ == 0) c.first = rank.step[row];
      norms.push_back(after);
    } else {
      c.largest_unclipped = std::max(c.largest_unclipped, before);
    }
  }
  // Norms that never move were clipped before the recorder saw them.
  const double usual = median(befores);
  size_t still = 0;
  for (const double n : befores) still += std::fabs(n - usual) <= 2e-3 * usual;
  if (befores.size() >= 20 && 10 * still >= 9 * befores.size()) {
    c.clipped = befores.size();
    c.norm = usual;
    c.constant = c.hidden = true;
    c.first = rank.step.front();
    return c;
  }
  if (norms.empty()) return c;
  c.norm = median(norms);
  size_t near = 0;
  for (const double n : norms) near += std::fabs(n - c.norm) <= 0.01 * c.norm;
  c.constant = 10 * near >= 9 * norms.size();
  return c;
}

}  // namespace

void findClippingChanged(const Subject& baseline, const Subject& candidate, Findings* out) {
  const Clipping b = clippingOf(*baseline.run), c = clippingOf(*candidate.run);
  if (b.steps < 3 || c.steps < 3) return;
  // By value, by layer or adaptive: there is no one norm to compare.
  if ((b.clipped > 0 && !b.constant) || (c.clipped > 0 && !c.constant)) return;
  Finding f{"clipping-changed", Severity::kHard, candidate.label, std::nullopt,
            candidate.run->ranks.front().header.rank};
  if (b.clipped >= 3 && c.clipped >= 3) {
    if (std::fabs(c.norm / b.norm - 1) <= 0.05) return;
    f.step = c.first;
    f.evidence =
        fmt::format("gradients are clipped to a norm of {:.4g}, the baseline's to {:.4g}", c.norm, b.norm);
    if (c.hidden) f.evidence += "; they come to the optimizer's step with that norm";
  } else if (b.clipped >= 3 && c.clipped == 0 && c.largest_unclipped > 1.05 * b.norm) {
    f.evidence = fmt::format("norms up to {:.4g} are not clipped; the baseline clips to {:.4g}",
                             c.largest_unclipped, b.norm);
  } else if (c.clipped >= 3 && b.clipped == 0 && b.largest_unclipped > 1.05 * c.norm) {
    f.step = c.first;
    f.evidence = fmt::format(
        "gradients are clipped to a norm of {:.4g}; the baseline leaves norms up to {:.4g} as they are",
        c.norm, b.largest_unclipped);
  } else {
    return;
  }
  f.cause =
      "another clipping norm, clipping before gradients are unscaled or reduced, by shard instead of over "
      "all of them, or not at all";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
