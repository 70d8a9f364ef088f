// Several ranks of one job side by side: collectives matched across ranks, what the wire needs, who waited
// for whom, and why the late one was late.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/account.h"

namespace halfwire::analysis {

// One rank's part. All pointers are borrowed.
struct RankLane {
  int32_t rank = 0;
  int64_t base_ns = 0;  // added to the lane's times to compare ranks
  const Lane* lane = nullptr;
  const trace::Strings* names = nullptr;
};

// What a late rank did while the others waited. The first kIdleCauses are the idle causes.
inline constexpr int kLateCauses = kIdleCauses + 3;
// "launch_bound", ..., "compute", "communication", "copy".
const char* lateCauseName(int cause);

struct LateRank {
  int32_t rank = 0;
  int64_t blame_ns =
      0;  // waiting of the others, averaged over them, in the collectives to which this rank came last
  std::array<int64_t, kLateCauses> causes{};  // of the time for which the first waited, in those collectives
  int cause = 0;                              // the largest
};

struct Group {
  std::vector<int32_t> ranks;
  size_t matched = 0;            // collectives, all process groups together
  size_t mismatched = 0;         // matched by position, of different type: the ranks' recordings differ
  int64_t intrinsic_ns = 0;      // sum over matched collectives of the minimum duration over ranks
  std::vector<int64_t> wait_ns;  // by rank: sum of duration - minimum
  std::vector<int64_t> exposed_wait_ns;      // by rank: the part of it that showed
  std::vector<int64_t> exposed_needed_ns;    // by rank
  std::vector<std::vector<int64_t>> needed;  // by rank, for each of its comms (its duration if not matched)
  int64_t end_skew_median_ns = 0;
  int64_t end_skew_max_ns = 0;
  std::vector<LateRank> late;  // by blame, largest first; only ranks that anyone waited for
};

// Matches by position from the end of each process group's sequence (recordings start at different times, and
// end together); where the types disagree, by position within each type.
Group matchRanks(const std::vector<RankLane>& lanes);

}  // namespace halfwire::analysis
