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
inline constexpr uint32_t kRunLogVersion = 1;
inline constexpr uint32_t kRunLogCommunicators = 256;
inline constexpr uint32_t kRunLogRows = 48;

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

  // The row of (op, type, reason), made on first use; null when the communicator's rows are used up.
  static RunLogRow* row(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type, Reason reason);

 private:
  RunLog() = default;
  RunLogFile* file_ = nullptr;
};

}  // namespace halfwire
