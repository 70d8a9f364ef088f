// Reads run logs after the process that wrote them is gone, and shows them: as the table of every decision,
// and as the JSON that docs/run-log.md describes. A log's bytes are checked in full; a damaged or foreign
// file is an error, never undefined behaviour.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "policy/policy.h"
#include "policy/run_log.h"
#include "wire/compare.h"

namespace halfwire {

inline constexpr int kRunLogJsonVersion = 1;

// One kind of call on one communicator; fields as in RunLogRow.
struct RunLogCall {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  Reason reason = Reason::kModeOff;
  uint64_t calls = 0;
  uint64_t bytes_asked = 0;
  uint64_t bytes_ring = 0;
  uint64_t bytes_sent = 0;
  uint64_t launches = 0;
  uint64_t host_ns = 0;
  uint64_t in_place = 0;
};

// Calls of one size; fields as in RunLogSize.
struct RunLogSized {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  uint64_t size_bucket = 0;  // the largest power of two not above a message's bytes
  uint64_t calls = 0;
  uint64_t bytes_asked = 0;
  uint64_t bytes_ring = 0;
  uint64_t bytes_sent = 0;
  uint64_t sampled_calls = 0;
  uint64_t waits = 0;
  uint64_t exposed_ns = 0;
};

// Samples in the shadow; fields as in RunLogShadow, times as medians of the last ones.
struct RunLogShadowed {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  WireFormat format;
  uint64_t bytes = 0;
  uint64_t samples = 0;
  ErrorSums sums;
  double exact_us = 0;
  double compressed_us = 0;
};

// One step; fields as in RunLogStep.
struct RunLogStepRecord {
  uint64_t number = 0;
  uint64_t begin_ns = 0;
  uint64_t duration_ns = 0;
  uint64_t calls = 0;
  uint64_t bytes_asked = 0;
  uint64_t bytes_ring = 0;
  uint64_t bytes_sent = 0;
  uint64_t host_blocked_ns = 0;
  uint64_t host_behind_ns = 0;
  bool sampled = false;
  bool measured = false;  // exposed_ns is there
  uint64_t exposed_ns = 0;
  uint32_t waits = 0;
  uint32_t unmeasured = 0;
};

// What the exposure meter saw; fields as in RunLogMeter.
struct RunLogMeterRecord {
  MeterState state = MeterState::kOff;
  StepSource source = StepSource::kNone;
  uint32_t every = 0;
  uint32_t warmup = 0;
  std::string words;
  std::string range;
  uint64_t collectives = 0;
  uint64_t event_calls = 0;
  uint64_t steps_begun = 0;
  uint64_t checked = 0;
  uint64_t predicted = 0;
  uint64_t waits = 0;
  uint64_t unmeasured = 0;
  uint64_t captured = 0;
  uint64_t lost_marks = 0;
  uint64_t blocking = 0;
  std::vector<RunLogStepRecord> steps;  // by number; the last kRunLogSteps of the run
};

struct RunLogComm {
  uint32_t slot = 0;  // order of creation in its process
  uint32_t rank = 0;
  uint32_t ranks = 0;
  Reason reason = Reason::kModeOff;
  uint64_t scratch_bytes = 0;
  uint64_t connection_bytes = 0;
  std::string note;
  uint64_t dropped = 0;
  std::vector<RunLogCall> calls;
  std::vector<RunLogSized> sizes{};  // only with the meter
  uint64_t dropped_sizes = 0;
  std::vector<RunLogShadowed> shadows{};  // only in shadow mode
  uint64_t dropped_shadows = 0;
};

// The log of one process. Texts hold no control characters.
struct RunLogRecord {
  int32_t pid = 0;
  int32_t rank = -1;
  int32_t world = 0;
  int32_t nccl_version = 0;
  std::string host;
  std::string engine;
  std::string nccl_path;
  std::string settings;
  std::string codec;
  std::string error;
  std::vector<std::string> unknown_entry_points;
  uint32_t communicators_made = 0;  // may exceed those that have a slot
  bool closed = false;              // the process ended normally
  std::vector<RunLogComm> communicators;
  RunLogMeterRecord meter;
};

// `bytes` is the whole file. Needs no alignment.
Result<RunLogRecord> parseRunLog(std::span<const std::byte> bytes);

// Reads one file. Refuses links and anything but a regular file.
Result<RunLogRecord> readRunLog(const std::string& path);

// Reads every *.bin of a folder, ordered by rank, then process id. Files that cannot be read are named in
// `problems`.
std::vector<RunLogRecord> readRunLogs(const std::string& directory, std::vector<std::string>* problems);

// One process as a JSON object, docs/run-log.md.
std::string runLogJson(const RunLogRecord& record);

// The inverse of runLogJson. Every field is checked; what is missing or of another kind is an error that
// names it.
Result<RunLogRecord> parseRunLogJson(std::string_view text);

// Reads one such file, of at most 64 MiB. Refuses links and anything but a regular file.
Result<RunLogRecord> readRunLogJson(const std::string& path);

// The table of all processes of a job, several lines, each ended by a newline. Communicators and calls of the
// ranks are merged; where ranks differ a cell reads "lowest..highest".
std::string runLogTable(const std::vector<RunLogRecord>& records);

// What to say when no process made a communicator: the fact and its likely causes.
std::string nothingIntercepted();

}  // namespace halfwire
