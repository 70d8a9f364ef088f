// The counters of one process in a mapped file, so that they outlive the process however it ends. The library
// writes them; `halfwire run` reads them after the child is gone and prints the table or keeps it as JSON.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "policy/policy.h"

namespace halfwire {

inline constexpr char kRunLogMagic[8] = {'H', 'W', 'R', 'U', 'N', 'L', 'O', 'G'};
inline constexpr uint32_t kRunLogVersion = 4;
inline constexpr uint32_t kRunLogCommunicators = 256;
inline constexpr uint32_t kRunLogRows = 48;
inline constexpr uint32_t kRunLogSizes = 48;
inline constexpr uint32_t kRunLogSteps = 4096;
inline constexpr uint32_t kRunLogShadows = 48;
inline constexpr uint32_t kRunLogShadowTimes = 32;

// One kind of call on one communicator. `key` is 0 while unused, else 1 + op | type << 8 | reason << 16.
struct RunLogRow {
  std::atomic<uint32_t> key;
  uint32_t reserved;
  std::atomic<uint64_t> calls;
  std::atomic<uint64_t> bytes_asked;  // the program's message, policy.h's messageBytes
  std::atomic<uint64_t> bytes_ring;   // an exact ring would send, this rank
  std::atomic<uint64_t> bytes_sent;   // packets this rank sent; equal to bytes_ring where not compressed
  std::atomic<uint64_t> launches;     // codec kernels launched
  std::atomic<uint64_t> host_ns;      // host time inside compressed calls
  std::atomic<uint64_t> in_place;     // compressed calls that overwrote their source
};

// Calls of one operation, type and size on one communicator, kept while the meter is on. `key` is 0 while
// unused, else 1 + op | type << 8 | size << 16, where size is the exponent of the largest power of two not
// above the message's bytes.
struct RunLogSize {
  std::atomic<uint32_t> key;
  uint32_t reserved;
  std::atomic<uint64_t> calls;
  std::atomic<uint64_t> bytes_asked;
  std::atomic<uint64_t> bytes_ring;
  std::atomic<uint64_t> bytes_sent;
  std::atomic<uint64_t> sampled_calls;  // enqueued in sampled steps
  std::atomic<uint64_t> waits;          // measured waits that these calls answer for
  std::atomic<uint64_t> exposed_ns;     // what those waits stood, each moment counted once
};

// Samples of one operation, type, message size and format in the shadow, on one communicator. `key` is 0
// while unused, else 1 + op | type << 8 | element format << 16 | scale format << 18 | log2(block) << 20. Sums
// as in ErrorSums.
struct RunLogShadow {
  std::atomic<uint32_t> key;
  uint32_t reserved;
  std::atomic<uint64_t> bytes;  // of the message
  std::atomic<uint64_t> samples;
  std::atomic<uint64_t> elements;
  std::atomic<uint64_t> flushed;
  std::atomic<uint64_t> not_finite;
  std::atomic<double> exact_squares;
  std::atomic<double> other_squares;
  std::atomic<double> error_squares;
  std::atomic<double> product;
  std::atomic<double> worst_block;
  // Of the last samples, number n in slot n % kRunLogShadowTimes.
  std::atomic<float> exact_us[kRunLogShadowTimes];
  std::atomic<float> compressed_us[kRunLogShadowTimes];
};

// One step. `number` is 0 while the slot is unused, else 1 + the step's number; written last.
struct RunLogStep {
  std::atomic<uint64_t> number;
  uint64_t begin_ns;  // CLOCK_MONOTONIC of the host
  uint64_t duration_ns;
  uint64_t bytes_asked;
  uint64_t bytes_ring;
  uint64_t bytes_sent;
  uint64_t calls;
  uint64_t host_blocked_ns;          // in calls that wait for the device
  uint64_t host_behind_ns;           // the part of it in waits behind a collective
  std::atomic<uint64_t> exposed_ns;  // of a sampled step, valid once `measured` is 1
  std::atomic<uint32_t> measured;
  uint32_t sampled;
  uint32_t waits;       // waits behind a collective that were looked at
  uint32_t unmeasured;  // waits that should have been and were not
};

enum class MeterState : uint32_t { kOff = 0, kOn = 1, kRefused = 2 };
enum class StepSource : uint32_t { kNone = 0, kMarked = 1, kDetected = 2, kRange = 3 };

// What the exposure meter saw in this process.
struct RunLogMeter {
  std::atomic<uint32_t> state;   // MeterState
  std::atomic<uint32_t> source;  // StepSource
  uint32_t every;                // one step in so many is sampled
  uint32_t warmup;               // steps before the first sampled one
  char words[256];               // why it is off, empty otherwise
  std::atomic<uint64_t> collectives;
  std::atomic<uint64_t> event_calls;  // calls of the CUDA runtime with events, or synchronising, that it saw
  std::atomic<uint64_t> steps;        // begun so far
  std::atomic<uint64_t> checked;      // collectives after steps were first detected ...
  std::atomic<uint64_t> predicted;    // ... and those that came as the repeating sequence said
  std::atomic<uint64_t> waits;        // measured
  std::atomic<uint64_t> unmeasured;   // not measured: no free events, or the runtime refused them
  std::atomic<uint64_t> captured;     // left alone because a graph was being captured
  std::atomic<uint64_t> lost_marks;   // events or streams that the tables had no room for
  std::atomic<uint64_t> blocking;     // communication streams that the legacy stream waits for by itself
  char range[64];  // of the program's NVTX ranges that are its steps, or were; empty otherwise
};

struct RunLogCommunicator {
  std::atomic<uint32_t> used;  // 1 once the fields below are valid
  uint32_t rank;
  uint32_t ranks;
  uint32_t reason;            // Reason: kCompressed, or why the communicator does not compress
  uint64_t scratch_bytes;     // allocated for it, fixed for its life
  uint64_t connection_bytes;  // device memory that connecting every pair of ranks took, 0 if unknown
  char note[192];             // further words, e.g. which member was not ready
  RunLogRow rows[kRunLogRows];
  std::atomic<uint64_t> dropped;  // calls that found no free row
  RunLogSize sizes[kRunLogSizes];
  std::atomic<uint64_t> dropped_sizes;  // the same for `sizes`
  RunLogShadow shadows[kRunLogShadows];
  std::atomic<uint64_t> dropped_shadows;  // samples that ran and are in no row
};

struct RunLogFile {
  char magic[8];
  uint32_t version;
  uint32_t bytes;  // sizeof(RunLogFile)
  int32_t pid;
  int32_t rank;   // RANK of the launcher, -1 if unknown
  int32_t world;  // 0 if unknown
  int32_t nccl_version;
  char host[64];
  char engine[16];  // "nccl" or "host"
  char nccl_path[256];
  char settings[256];
  char codec[32];                       // what the codec runs as: "AVX2", "hardware", ...
  char error[512];                      // the last error Halfwire caused, e.g. a member without the library
  char unknown_entry_points[512];       // functions of the loaded NCCL that this version does not know
  std::atomic<uint32_t> communicators;  // slots taken, may exceed kRunLogCommunicators
  std::atomic<uint32_t> closed;         // 1 after a normal end of the process
  RunLogCommunicator communicator[kRunLogCommunicators];
  RunLogMeter meter;
  RunLogStep step[kRunLogSteps];  // the last ones: step n is in slot n % kRunLogSteps
};

// Owns the mapping. Without a directory the counters live in anonymous memory and die with the process.
// Writers are thread-safe; a forked child must not write (it gets its own log or none).
class RunLog {
 public:
  // Creates `directory`/halfwire-<host>-<pid>-<n>.bin. The directory must exist.
  static Result<std::unique_ptr<RunLog>> create(const std::string& directory);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  RunLogFile& file() { return *file_; }

  // A slot for a new communicator, or null when all are taken.
  RunLogCommunicator* addCommunicator();

  // Copies `text`, cut to the field, zero-terminated.
  template <size_t N>
  static void setText(char (&field)[N], const std::string& text) {
    const size_t n = text.size() < N - 1 ? text.size() : N - 1;
    for (size_t i = 0; i < n; ++i) field[i] = text[i];
    field[n] = '\0';
  }

  static constexpr uint32_t rowKey(CollectiveOp op, ncclDataType_t type, Reason reason) {
    return 1u + (static_cast<uint32_t>(op) | static_cast<uint32_t>(type) << 8 |
                 static_cast<uint32_t>(reason) << 16);
  }

  // The row of (op, type, reason), made on first use; null when the communicator's rows are used up.
  static RunLogRow* row(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type, Reason reason);

  // The row of (op, type, size of `bytes`) that the meter keeps; null when they are used up.
  static RunLogSize* sizeRow(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type, uint64_t bytes);

  // The row of a sample; null when they are used up. One writer a communicator.
  static RunLogShadow* shadowRow(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type,
                                 uint64_t bytes, const WireFormat& format);

 private:
  RunLog() = default;
  RunLogFile* file_ = nullptr;
};

}  // namespace halfwire
