#include "policy/run_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

namespace halfwire {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters in shared memory must be lock-free");

Result<std::unique_ptr<RunLog>> RunLog::create(const std::string& directory) {
  void* memory = MAP_FAILED;
  if (directory.empty()) {
    memory = mmap(nullptr, sizeof(RunLogFile), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Status(StatusCode::kOutOfMemory, "no memory for the call counters");
  } else {
    char host[64] = {};
    gethostname(host, sizeof host - 1);
    int fd = -1;
    std::string path;
    // O_EXCL and O_NOFOLLOW: never write through somebody else's file.
    for (int attempt = 0; attempt < 100 && fd < 0; ++attempt) {
      path = fmt::format("{}/halfwire-{}-{}-{}.bin", directory, host, getpid(), attempt);
      fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
      if (fd < 0 && errno != EEXIST) break;
    }
    if (fd < 0) {
      return Status(
          StatusCode::kUnavailable,
          fmt::format(
              "cannot create {} ({}): HALFWIRE_LOG_DIR must name a folder that exists and can be written",
              path, std::strerror(errno)));
    }
    // posix_fallocate, not ftruncate: a full disk must fail here, not as SIGBUS inside the training program.
    const int full = posix_fallocate(fd, 0, sizeof(RunLogFile));
    if (full == 0) memory = mmap(nullptr, sizeof(RunLogFile), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) {
      unlink(path.c_str());
      return Status(StatusCode::kUnavailable,
                    fmt::format("cannot map {}: free some space on its disk", path));
    }
  }
  std::unique_ptr<RunLog> log(new RunLog);
  log->file_ = new (memory) RunLogFile();
  RunLogFile& f = *log->file_;
  std::memcpy(f.magic, kRunLogMagic, sizeof f.magic);
  f.version = kRunLogVersion;
  f.bytes = sizeof(RunLogFile);
  f.pid = getpid();
  f.rank = -1;
  gethostname(f.host, sizeof f.host - 1);
  return log;
}

RunLog::~RunLog() {
  if (file_ != nullptr) munmap(file_, sizeof(RunLogFile));
}

RunLogCommunicator* RunLog::addCommunicator() {
  const uint32_t slot = file_->communicators.fetch_add(1, std::memory_order_relaxed);
  return slot < kRunLogCommunicators ? &file_->communicator[slot] : nullptr;
}

namespace {

// The row with this key, taken if none has it yet; null if all are others'.
template <class Row, size_t N>
Row* claim(Row (&rows)[N], uint32_t key) {
  for (Row& row : rows) {
    uint32_t seen = row.key.load(std::memory_order_relaxed);
    if (seen == key) return &row;
    if (seen != 0) continue;
    if (row.key.compare_exchange_strong(seen, key, std::memory_order_relaxed) || seen == key) return &row;
  }
  return nullptr;
}

}  // namespace

RunLogRow* RunLog::row(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type, Reason reason) {
  return claim(comm.rows, rowKey(op, type, reason));
}

RunLogSize* RunLog::sizeRow(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type, uint64_t bytes) {
  const uint32_t exponent = bytes == 0 ? 0 : static_cast<uint32_t>(std::bit_width(bytes)) - 1;
  return claim(comm.sizes,
               1u + (static_cast<uint32_t>(op) | static_cast<uint32_t>(type) << 8 | exponent << 16));
}

RunLogShadow* RunLog::shadowRow(RunLogCommunicator& comm, CollectiveOp op, ncclDataType_t type,
                                uint64_t bytes, const WireFormat& format) {
  const uint32_t key =
      1u + (static_cast<uint32_t>(op) | static_cast<uint32_t>(type) << 8 |
            static_cast<uint32_t>(format.element) << 16 | static_cast<uint32_t>(format.scale) << 18 |
            static_cast<uint32_t>(std::countr_zero(format.block)) << 20);
  for (RunLogShadow& row : comm.shadows) {
    const uint32_t seen = row.key.load(std::memory_order_relaxed);
    if (seen == key && row.bytes.load(std::memory_order_relaxed) == bytes) return &row;
    if (seen != 0) continue;
    row.bytes.store(bytes, std::memory_order_relaxed);
    row.key.store(key, std::memory_order_release);
    return &row;
  }
  return nullptr;
}

}  // namespace halfwire
