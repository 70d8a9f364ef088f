// Reads run logs after the process that wrote them is gone, and shows them: as the table of every decision,
// and as the JSON that docs/run-log.md describes. A log's bytes are checked in full; a damaged or foreign
// file is an error, never undefined behaviour.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "policy/policy.h"

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

// The table of all processes of a job, several lines, each ended by a newline. Communicators and calls of the
// ranks are merged; where ranks differ a cell reads "lowest..highest".
std::string runLogTable(const std::vector<RunLogRecord>& records);

// What to say when no process made a communicator: the fact and its likely causes.
std::string nothingIntercepted();

}  // namespace halfwire
