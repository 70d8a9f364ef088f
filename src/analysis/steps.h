// Cuts a device's time into training steps.
#pragma once

#include <cstdint>
#include <vector>

#include "trace/timeline.h"

namespace halfwire::analysis {

struct StepWindow {
  int64_t number = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

// `members`: indices of one device's activities, by start. A step runs on the device from the first activity
// that was launched within its annotation to the first of the next step; the last one to `end_ns`. Without
// annotations the period of the sequence of collectives is used (`detected` is set), with at least three
// repetitions. Windows do not overlap.
std::vector<StepWindow> findSteps(const trace::Timeline& timeline, const std::vector<uint32_t>& members,
                                  int64_t end_ns, bool* detected);

// The smallest p such that `sequence` repeats with period p in at least 95 % of its places and at least three
// times, or 0.
size_t findPeriod(const std::vector<uint64_t>& sequence);

}  // namespace halfwire::analysis
