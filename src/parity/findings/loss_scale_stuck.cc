// loss-scale-stuck: a loss scaler that no longer adapts.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findLossScaleStuck(const Subject& s, Findings* out) {
  const RankRecord& rank = s.run->ranks.front();
  if (rank.loss_scale.empty()) return;
  constexpr size_t kSkips = 20;       // a scaler halves at every skip: from 65536 to 1 takes 16
  constexpr size_t kNoGrowth = 4000;  // twice torch's growth interval
  const size_t rows = rank.rows();
  Finding f{"loss-scale-stuck", Severity::kHard, s.label, std::nullopt, rank.header.rank};

  // Skips one after the other that do not move the scale.
  size_t in_a_row = 0;
  for (size_t row = 0; row < rows; ++row) {
    const bool same = row > 0 && rank.loss_scale[row] == rank.loss_scale[row - 1];
    in_a_row = rank.skipped[row] == 1 ? (same ? in_a_row + 1 : 1) : 0;
    if (in_a_row < kSkips) continue;
    f.step = rank.step[row + 1 - kSkips];
    f.evidence = fmt::format("{} steps in a row were skipped at a loss scale of {} that did not change",
                             kSkips, rank.loss_scale[row]);
    f.cause = "the scaler is not updated after a skipped step, or lies at its smallest value";
    out->push_back(std::move(f));
    return;
  }

  // At its floor, with steps still skipped.
  size_t low = 0, low_skipped = 0;
  const size_t tail = rows - rows / 5;
  for (size_t row = tail; row < rows; ++row) {
    const double scale = rank.loss_scale[row];
    if (!(scale <= 1)) continue;
    if (low++ == 0) f.step = rank.step[row];
    low_skipped += rank.skipped[row] == 1;
  }
  bool ever_above = false;
  for (size_t row = 0; row < rows; ++row) ever_above = ever_above || rank.loss_scale[row] > 1;
  if (low >= 5 && 2 * low > rows - tail && (ever_above || low_skipped > 0)) {
    const bool skips = 4 * low_skipped >= low;
    f.severity = skips ? Severity::kHard : Severity::kWarning;
    f.evidence =
        fmt::format("the loss scale is 1 or less at {} of the last {} steps, of which {} were skipped", low,
                    rows - tail, low_skipped);
    f.cause = "gradients overflow at any scale: the model has diverged, or computes NaN";
    out->push_back(std::move(f));
    return;
  }

  // Fell once and never grew again.
  double largest = 0;
  size_t still = 0;
  for (size_t row = 0; row < rows; ++row) {
    const double scale = rank.loss_scale[row];
    largest = std::max(largest, scale);
    const bool same = row > 0 && scale == rank.loss_scale[row - 1] && rank.skipped[row] != 1;
    still = same ? still + 1 : 0;
    if (still < kNoGrowth || !(scale < largest)) continue;
    f.severity = Severity::kWarning;
    f.step = rank.step[row - kNoGrowth];
    f.evidence =
        fmt::format("the loss scale stays at {}, below its {} of before, for {} steps without a skip", scale,
                    largest, kNoGrowth);
    f.cause = "the scaler's growth is off or its update is not called";
    out->push_back(std::move(f));
    return;
  }
}

}  // namespace halfwire::parity
