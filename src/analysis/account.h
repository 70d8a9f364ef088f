// Where one device's time went: exact sums over overlapping intervals, for the whole recording and for each
// step.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/intervals.h"
#include "trace/timeline.h"

namespace halfwire::analysis {

// Nanoseconds. compute + exposed + copy_alone + idle == span, exactly.
struct Parts {
  int64_t span = 0;           // first start to last end
  int64_t compute = 0;        // some compute kernel runs
  int64_t comm = 0;           // some communication kernel runs (without codec)
  int64_t codec = 0;          // some kernel of Halfwire runs
  int64_t exposed = 0;        // communication or codec runs, and no compute kernel
  int64_t exposed_codec = 0;  // the part of `exposed` in which only codec runs
  int64_t exposed_bare = 0;   // the part of `exposed` in which no copy runs either
  int64_t copy = 0;           // some copy or set runs
  int64_t copy_alone = 0;     // and nothing else
  int64_t idle = 0;           // nothing runs

  void add(const Parts& p);
};

enum class State : uint8_t { kIdle, kCompute, kHidden, kExposed, kCopy };
// A stretch of time in one state. kHidden: communication under compute.
struct Segment {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  State state = State::kIdle;
};

// Why nothing ran. The order is the order of `kIdleCauseNames`.
enum class IdleCause : uint8_t {
  kLaunchBound,  // the next launch came after the device had run dry, the host was busy with other things
  kCommunicationWait,  // the launching thread was inside a collective on the host (gloo, mpi)
  kHostSync,           // the launching thread was blocked in a synchronisation or a blocking copy
  kDataLoading,        // the launching thread was waiting for a data loader
  kDeviceGap,          // already launched: latency between kernels, or a dependency the trace does not show
  kUnrecorded,         // the trace does not say what launched the next kernel
};
inline constexpr int kIdleCauses = 6;
extern const char* const kIdleCauseNames[kIdleCauses];  // "launch_bound", ...

struct Gap {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  std::array<int64_t, kIdleCauses> causes{};  // add up to the gap
  bool host_late = false;
};

struct StepAccount {
  int64_t number = 0;
  int64_t start_ns = 0;
  Parts parts;
  int64_t stalled = 0;  // of Lane::stalled
  // Had every wait whose event is not named held its stream up until the last end of a collective, or of what
  // follows one on its stream, that the trace shows before the stream went on.
  int64_t stalled_at_most = 0;
};

// One communication interval with its share of exposed time. Simultaneous collectives share exposed time
// equally.
struct CommInterval {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t exposed_ns = 0;
  uint32_t activity = 0;
  trace::CommInfo info;
  uint32_t name = 0;
};

// How `stalled` is known.
enum class StalledFrom : uint8_t {
  kNothing,   // no waits are recorded; or none is named, no stall inferred and nothing known of some
  kRecorded,  // the recorder says what each wait was for
  kInferred,  // at least a part follows from times alone
};

struct Lane {
  int32_t device = 0;
  size_t activities = 0;
  size_t kernels = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  Parts total;
  std::vector<StepAccount> steps;
  bool steps_detected = false;  // from the pattern of collectives, not annotated
  int64_t outside_steps_ns = 0;
  std::array<int64_t, kIdleCauses> idle{};
  int64_t idle_host_late = 0;           // whole gaps whose next launch call ended after the device ran dry
  int64_t idle_launched_before = 0;     // whole gaps whose next launch call was over by then
  int64_t idle_unmatched = 0;           // whole gaps with no launch call recorded
  int64_t launch_bound_after_sync = 0;  // the part of launch_bound in gaps that a host synchronisation began
  int64_t launch_bound_host_quiet =
      0;                     // the part of launch_bound in which the host ran nothing that was recorded
  size_t waits = 0;          // of its streams for events
  size_t waits_unknown = 0;  // those of which nothing is known (analysis/waits.h)
  StalledFrom stalled_from = StalledFrom::kNothing;
  // A stream that computes waited at an event behind a collective, with nothing else to run on that stream,
  // or ran a collective itself. Of no meaning where stalled_from is kNothing.
  int64_t stalled = 0;
  int64_t stalled_at_most = 0;  // as StepAccount's
  int64_t graph_kernels = 0;
  std::vector<CommInterval> comms;  // by start
  std::vector<Segment> segments;    // cover [start, end)
  std::vector<Gap> gaps;
  Spans stall_spans;
};

// One lane for each device with activity, by device number.
std::vector<Lane> accountLanes(const trace::Timeline& timeline);

}  // namespace halfwire::analysis
