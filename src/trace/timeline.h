// What a recording says, whatever tool made it: device intervals, the host calls that launched them, event
// waits, steps, and what is known of each collective. Times are whole nanoseconds; adding `base_ns` gives
// nanoseconds since the epoch where the recorder said so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trace/strings.h"

namespace halfwire::trace {

enum class Format : uint8_t { kKineto, kNsys };

enum class ActivityKind : uint8_t { kCompute, kComm, kCodec, kCopy, kSet };

inline bool isCommunication(ActivityKind k) { return k == ActivityKind::kComm || k == ActivityKind::kCodec; }
inline bool isCopy(ActivityKind k) { return k == ActivityKind::kCopy || k == ActivityKind::kSet; }

enum class Collective : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kAllToAll,
  kSendRecv,
  kGather,
  kScatter,
  kBarrier,
  kDispatch,  // mixture of experts: tokens to experts
  kCombine,   // and back
  kGeneric,   // one kernel for every collective (RCCL, grouped calls): the type is not in its name
};

// The name used in reports: "all_reduce", ...
const char* collectiveName(Collective type);

enum class ElementType : uint8_t {
  kUnknown,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFp8,
  kFp16,
  kBf16,
  kFp32,
  kFp64
};
// Bytes of one element, 0 for kUnknown.
int elementSize(ElementType type);
const char* elementName(ElementType type);

// What is recorded about one communication interval. Fields that the trace lacks are 0, -1 or kUnknown.
struct CommInfo {
  Collective type = Collective::kGeneric;
  ElementType element = ElementType::kUnknown;
  bool has_sizes = false;
  int32_t group_size = 0;
  int64_t in_elements = 0;
  int64_t out_elements = 0;
  int64_t sequence = -1;
  int32_t group_name = -1;   // Strings id
  int32_t group_ranks = -1;  // Strings id of the recorded list
};

inline constexpr int32_t kNone = -1;

struct Activity {
  int64_t start_ns = 0;
  int64_t end_ns = 0;  // >= start_ns
  int64_t correlation = -1;
  uint32_t name = 0;
  int32_t stream = 0;    // index into Timeline::streams
  int32_t call = kNone;  // index into Timeline::calls
  int32_t comm = kNone;  // index into Timeline::comms
  ActivityKind kind = ActivityKind::kCompute;
  bool in_graph = false;

  int64_t duration() const { return end_ns - start_ns; }
};

// A stream of one device. Numbers repeat between devices, so both are the key.
struct Stream {
  int32_t device = 0;
  int64_t number = 0;
};

enum class CallKind : uint8_t {
  kLaunch,
  kGraphLaunch,
  kCopy,
  kSync,
  kEventSync,
  kEventRecord,
  kStreamWait,
  kOther
};

struct HostCall {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t correlation = -1;
  uint32_t name = 0;
  int32_t thread = 0;  // index into Timeline::threads
  CallKind kind = CallKind::kOther;
};

// The recorder's own statement that a stream waited for an event recorded on another one.
struct StreamWait {
  int64_t time_ns = 0;
  int32_t waiting_stream = 0;
  int32_t source_stream = kNone;
  int64_t record_correlation = -1;  // of the event's record call
  int64_t correlation = -1;         // of the wait call
};

struct Span {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

struct Step {
  int64_t number = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

struct Thread {
  int64_t process = 0;
  int64_t number = 0;
  std::vector<Span> busy;     // merged: inside recorded operators and API calls
  std::vector<Span> loading;  // inside a data loader's next()
};

// A host operator that issues communication, by which kernels without metadata of their own are described.
struct CommOp {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int32_t thread = 0;
  CommInfo info;
  bool on_host = false;  // a backend that moves the bytes on the CPU (gloo, mpi)
};

struct Timeline {
  std::string file;
  Format format = Format::kKineto;
  std::optional<int32_t> rank;
  int32_t world_size = 0;  // 0: not recorded
  int64_t base_ns = 0;
  uint64_t json_bytes = 0;  // after decompression; the file's size for SQLite
  uint64_t events = 0;
  uint64_t events_end = 0;  // byte offset of the array's closing bracket (Kineto), 0 if unknown

  Strings names;
  std::vector<Stream> streams;
  std::vector<Thread> threads;
  std::vector<Activity> activities;  // by start
  std::vector<HostCall> calls;       // by start
  std::vector<StreamWait> waits;     // by time
  std::vector<CommInfo> comms;
  std::vector<CommOp> comm_ops;
  std::vector<Step> steps;  // host annotations, by start
  std::vector<std::string> warnings;
  std::vector<std::pair<std::string, uint32_t>>
      comm_names;  // kernels taken for communication, with their number
};

}  // namespace halfwire::trace
