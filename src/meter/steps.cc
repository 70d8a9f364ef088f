#include "meter/steps.h"

#include <algorithm>

namespace halfwire::meter {

StepFinder::StepFinder() : history_(kHistory) {}

bool StepFinder::repeats(uint32_t period, uint64_t window) const {
  for (uint64_t i = 0; i + period < window; ++i) {
    if (ago(i).hash != ago(i + period).hash) return false;
  }
  return true;
}

// The shortest period that the last calls repeat at least three times. A run of equal calls inside a step
// looks like a period too: it ends with the run, and then the next one must hold for twice as long.
void StepFinder::search() {
  const uint64_t have = std::min(count_, kHistory);
  for (uint32_t period = 1; uint64_t{period} * kRepeats <= have; ++period) {
    const uint64_t window = std::max<uint64_t>(uint64_t{period} * kRepeats, doubt_);
    if (window > have) break;
    if (!repeats(period, window)) continue;
    period_ = period;
    held_ = window;
    // The step begins where the host pauses longest between its collectives: for the forward pass, the data,
    // the optimizer.
    int64_t longest = -1;
    for (uint32_t at = 0; at < period; ++at) {
      int64_t gap = 0;
      for (uint32_t k = 0; k < kRepeats; ++k) gap += ago(at + uint64_t{k} * period).gap_ns;
      if (gap <= longest) continue;
      longest = gap;
      anchor_ = count_ - 1 - at;
    }
    return;
  }
}

bool StepFinder::onCollective(uint64_t hash, int64_t now_ns) {
  history_[count_ % kHistory] = {hash, count_ == 0 ? 0 : now_ns - last_ns_};
  last_ns_ = now_ns;
  ++count_;
  if (period_ != 0) {
    ++checked_;
    if (ago(period_).hash == hash) {
      ++predicted_;
      ++held_;
      return (count_ - 1 - anchor_) % period_ == 0;
    }
    doubt_ = std::min(std::max(doubt_, 2 * held_), kMostDoubt);
    period_ = 0;
    next_try_ = count_ + 1;
    return false;
  }
  if (checked_ > 0) ++checked_;
  if (count_ < next_try_) return false;
  search();
  // A search costs as much as the history is long; a period of a thousand calls may be found a few calls
  // late.
  next_try_ = count_ + 1 + std::min(count_, kHistory) / 64;
  return false;
}

}  // namespace halfwire::meter
