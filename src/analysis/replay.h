// The recording as a graph of causes: a kernel starts after the one before it on its stream, its launch, and
// the work it waits for; a host call after the one before it on its thread; a synchronisation ends after what
// it waits for. Replayed unchanged it gives the recorded times; with communication scaled it says what would
// have happened.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "analysis/account.h"
#include "trace/timeline.h"

namespace halfwire::analysis {

enum class PathKind : uint8_t {
  kCompute,
  kComm,
  kCodec,
  kCopy,
  kHost,
  kHostSync,
  kLaunchLatency,
  kUnexplained
};
inline constexpr int kPathKinds = 8;
extern const char* const kPathKindNames[kPathKinds];

struct PathPiece {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  PathKind kind = PathKind::kHost;
};

struct ReplayStep {
  int64_t number = 0;
  int64_t measured_ns = 0;
  int64_t replayed_ns = 0;  // without change
  int64_t what_if_ns = 0;
  std::array<int64_t, kPathKinds> critical{};  // the critical path within the step; adds up to measured_ns
  int64_t unexplained_ns = 0;                  // of it
};

struct ReplayResult {
  int64_t measured_ns = 0;
  int64_t replayed_ns = 0;
  int64_t what_if_ns = 0;
  int64_t unexplained_ns = 0;                  // gaps on the critical path that no predecessor explains
  std::array<int64_t, kPathKinds> critical{};  // adds up to measured_ns
  std::vector<ReplayStep> steps;               // one entry for the whole recording if there are no steps
};

// `lane`: of this timeline. `comm_scale` multiplies the time that communication needs; `needed` (one entry
// for each of lane.comms, or empty) says how much of each kernel that is, the rest being waiting, which
// stays.
ReplayResult replay(const trace::Timeline& timeline, const Lane& lane, double comm_scale,
                    const std::vector<int64_t>& needed);

}  // namespace halfwire::analysis
