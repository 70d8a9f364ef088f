// steps-skipped and loss-not-finite: updates that were lost to numbers that are not finite.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findStepsSkipped(const Subject& s, Findings* out) {
  const RankRecord& rank = s.run->ranks.front();
  const size_t rows = rank.rows();
  // A scaler starts high on purpose: its first skips, and the first tenth, do not count.
  size_t from = 0;
  while (from < rows && rank.skipped[from] == 1) ++from;
  const bool never = from == rows && rows >= 20;
  if (never) from = 0;
  if (!never) from = std::max(from, rows / 10);
  size_t bad = 0, skipped = 0;
  std::optional<size_t> first;
  for (size_t row = from; row < rows; ++row) {
    if (!skippedOrBad(rank, row)) continue;
    ++bad;
    skipped += rank.skipped[row] == 1;
    if (!first) first = row;
  }
  const double share = rows > from ? static_cast<double>(bad) / static_cast<double>(rows - from) : 0;
  if (!first || share <= 0.02 || (bad < 3 && share < 0.2)) return;
  Finding f{"steps-skipped", share > 0.2 && bad >= 3 ? Severity::kHard : Severity::kWarning, s.label,
            rank.step[*first], rank.header.rank};
  f.evidence =
      fmt::format("{} of {} steps had gradients that are not finite or were skipped ({} skipped){}", bad,
                  rows - from, skipped, never ? ": no update was ever done" : ", the start aside");
  f.cause = "overflow in 16-bit arithmetic, a loss scale that is too high, or NaN in the data or the model";
  out->push_back(std::move(f));
}

void findLossNotFinite(const Subject& s, Findings* out) {
  size_t bad = 0;
  std::optional<uint32_t> first;
  for (size_t i = 0; i < s.losses.loss.size(); ++i) {
    if (std::isfinite(s.losses.loss[i])) continue;
    ++bad;
    if (!first) first = s.losses.step[i];
  }
  if (!first) return;
  const bool ends = !std::isfinite(s.losses.loss.back());
  Finding f{"loss-not-finite", ends ? Severity::kHard : Severity::kWarning, s.label, *first, std::nullopt};
  f.evidence = fmt::format("the loss is not finite at {} of {} steps{}", bad, s.losses.loss.size(),
                           ends ? ", the last among them" : "");
  f.cause = "divergence, overflow, or NaN in the data";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
