// update-zero: an optimizer step that changes nothing though rate and gradient are not zero.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

bool zero(const Group& g, size_t row) {
  if (g.update_norm[row] != 0 || !(g.grad_norm[row] > 0) || !(g.lr[row] > 0)) return false;
  // The sample may hold nothing of the group, or only elements whose gradient is zero.
  if (g.param_norm[row] == 0) return false;
  return g.unchanged[row] != 0;
}

}  // namespace

void findUpdateZero(const Subject& s, Findings* out) {
  for (const RankRecord& rank : s.run->ranks) {
    for (size_t group = 0; group < rank.groups.size(); ++group) {
      const Group& g = rank.groups[group];
      if (g.update_norm.empty()) continue;
      double largest = 0;
      for (size_t row = 0; row < rank.rows(); ++row) {
        if (g.lr[row] > largest) largest = g.lr[row];
      }
      size_t count = 0, in_a_row = 0, longest = 0, first = 0, looked = 0;
      for (size_t row = 0; row < rank.rows(); ++row) {
        // At the ends of a schedule updates are smaller than any last place.
        if (!(g.lr[row] >= 0.1 * largest) || skippedOrBad(rank, row) || std::isnan(g.update_norm[row]))
          continue;
        ++looked;
        if (!zero(g, row)) {
          in_a_row = 0;
          continue;
        }
        if (count++ == 0) first = row;
        longest = std::max(longest, ++in_a_row);
      }
      // One at the start is step0-no-op.
      if (count == 0 || (count == 1 && rank.step[first] == 0)) continue;
      const bool low = rank.header.precision == "bf16" || rank.header.precision == "fp16";
      // Most of them, or all from some step on: not a rounding here and there.
      const bool hard = longest >= 2 && (2 * count >= looked || in_a_row >= 2);
      Finding f{"update-zero", hard ? Severity::kHard : Severity::kWarning, s.label, rank.step[first],
                rank.header.rank};
      f.evidence = fmt::format(
          "{} of {} updates of group {} are exactly zero ({} in a row); at step {} the gradient's norm is {} "
          "and the "
          "rate {}",
          count, looked, group, longest, rank.step[first], g.grad_norm[first], g.lr[first]);
      f.cause = low ? "updates smaller than half a unit in the last place of the 16-bit parameters; or the "
                      "optimizer "
                      "holds other tensors than the model"
                    : "the optimizer holds other tensors than the model uses (made before the model was "
                      "moved, wrapped "
                      "or cast), or its step is not called";
      out->push_back(std::move(f));
      return;
    }
  }
}

}  // namespace halfwire::parity
