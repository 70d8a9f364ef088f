// Two processes, one a GPU, that measure something together: start, meet, share small values, take times from
// the first one's start to the last one's end on the clock that both read. One process a GPU, as training
// programs have it, since NCCL takes other paths between threads of one process.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace halfwire::two_gpu {

inline constexpr int kRanks = 2;

[[noreturn]] inline void die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::_Exit(1);
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) die("%s: %s", what, cudaGetErrorString(error));
}
inline void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) die("%s: %s (%s)", what, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

inline double nowUs() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  const size_t half = v.size() / 2;
  return v.size() % 2 != 0 ? v[half] : (v[half - 1] + v[half]) / 2;
}

// Memory that both processes map at the same address.
inline void* mapShared(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) die("cannot map %zu shared bytes", bytes);
  return p;
}

class Pair {
 public:
  static constexpr int kValues = 8;

  // Forks. Must come before any call of CUDA.
  Pair() : shared_(static_cast<Shared*>(mapShared(sizeof(Shared)))) {
    const pid_t parent = getpid();
    child_ = fork();
    if (child_ < 0) die("cannot start the second rank");
    rank_ = child_ == 0 ? 1 : 0;
    if (rank_ == 1) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) std::_Exit(1);
    }
  }

  int rank() const { return rank_; }
  int peer() const { return 1 - rank_; }

  // Fails where the other rank died or took longer than two minutes.
  void barrier() {
    const uint32_t turn = shared_->turn.load(std::memory_order_relaxed);
    if (shared_->arrived.fetch_add(1) + 1 == kRanks) {
      shared_->arrived.store(0);
      shared_->turn.store(turn + 1, std::memory_order_release);
      return;
    }
    const double limit = nowUs() + 120e6;
    for (uint32_t spins = 1; shared_->turn.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins % 65536 != 0) continue;
      if (rank_ == 0 && waitpid(child_, nullptr, WNOHANG) == child_) die("the second rank ended early");
      if (nowUs() > limit) die("rank %d waited two minutes for the other one", rank_);
    }
  }

  // The largest over the ranks, element by element.
  void maxOver(double* values, int n) {
    for (int i = 0; i < n; ++i) shared_->values[rank_][i] = values[i];
    barrier();
    for (int i = 0; i < n; ++i) values[i] = std::max(shared_->values[0][i], shared_->values[1][i]);
    barrier();
  }
  double maxOver(double value) {
    maxOver(&value, 1);
    return value;
  }
  double sumOver(double value) {
    shared_->values[rank_][0] = value;
    barrier();
    const double sum = shared_->values[0][0] + shared_->values[1][0];
    barrier();
    return sum;
  }
  bool same(uint64_t value) {
    shared_->words[rank_] = value;
    barrier();
    const bool same = shared_->words[0] == shared_->words[1];
    barrier();
    return same;
  }

  // A communicator of both ranks with at least `ctas` thread blocks a collective; 0 leaves that to NCCL.
  ncclComm_t connect(int ctas) {
    if (rank_ == 0) check(ncclGetUniqueId(&shared_->id), "cannot make an id");
    barrier();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (ctas > 0) {
      config.minCTAs = ctas;
      config.maxCTAs = 64;  // as many as NCCL has; it refuses a least number alone
    }
    ncclComm_t comm = nullptr;
    check(ncclCommInitRankConfig(&comm, kRanks, shared_->id, rank_, &config), "cannot connect the ranks");
    barrier();
    return comm;
  }

  // Microseconds of one of `calls` calls of `work` in a row, and of those until the host had enqueued it.
  struct Time {
    double us = 0;
    double host_us = 0;
  };
  template <class Work>
  Time time(int calls, cudaStream_t stream, Work&& work) {
    check(cudaStreamSynchronize(stream), "the stream failed");
    barrier();
    const double begin = nowUs();
    for (int i = 0; i < calls; ++i) work();
    const double enqueued = nowUs();
    check(cudaStreamSynchronize(stream), "the stream failed");
    double all[3] = {nowUs(), -begin, enqueued - begin};
    maxOver(all, 3);
    return {(all[0] + all[1]) / calls, all[2] / calls};
  }

  // Waits for the second rank; the exit code of both.
  int finish() {
    barrier();
    if (rank_ == 1) return 0;
    int status = 0;
    waitpid(child_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }

 private:
  struct Shared {
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> turn;
    double values[kRanks][kValues];
    uint64_t words[kRanks];
    ncclUniqueId id;
  };

  Shared* shared_;
  pid_t child_ = 0;
  int rank_ = 0;
};

inline std::vector<uint64_t> readSizes(const char* text) {
  std::vector<uint64_t> sizes;
  std::stringstream in(text);
  for (std::string item; std::getline(in, item, ',');) {
    const uint64_t bytes = std::strtoull(item.c_str(), nullptr, 10);
    if (bytes < 4096 || bytes % 4096 != 0 || bytes > (2ull << 30))
      die("size %s is not a multiple of 4096 up to 2 GiB", item.c_str());
    sizes.push_back(bytes);
  }
  if (sizes.empty()) die("no sizes");
  return sizes;
}

// The arguments of both programs; the program ends with the usage or the reason where they are wrong.
struct ProgramArguments {
  ProgramArguments(int argc, char** argv, const char* program) {
    if (argc != 5) die("usage: %s OUT.jsonl LINK REPEAT BYTES[,BYTES...]", program);
    out = argv[1];
    link = argv[2];
    repeat = std::atoi(argv[3]);
    sizes = readSizes(argv[4]);
    if (repeat < 1 || repeat > 1000) die("REPEAT is 1 to 1000");
  }
  std::FILE* open() const {
    std::FILE* file = std::fopen(out, "w");
    if (file == nullptr) die("cannot write %s", out);
    return file;
  }

  const char* out = nullptr;
  const char* link = nullptr;
  int repeat = 0;
  std::vector<uint64_t> sizes;
};

// One JSON object after another, a line each, from rank 0 alone.
class JsonLine {
 public:
  JsonLine& text(const char* name, const std::string& value) { return add(name, "\"" + value + "\""); }
  JsonLine& number(const char* name, double value) {
    char buffer[64];
    std::snprintf(buffer, sizeof buffer, "%.9g", value);
    return add(name, std::isfinite(value) ? buffer : "null");
  }
  JsonLine& boolean(const char* name, bool value) { return add(name, value ? "true" : "false"); }
  JsonLine& numbers(const char* name, const std::vector<double>& values) {
    std::string list;
    for (const double v : values) {
      char buffer[64];
      std::snprintf(buffer, sizeof buffer, "%s%.6g", list.empty() ? "" : ", ", v);
      list += buffer;
    }
    return add(name, "[" + list + "]");
  }
  void print(std::FILE* to) {
    std::fprintf(to, "{%s}\n", fields_.c_str());
    std::fflush(to);
  }

 private:
  JsonLine& add(const char* name, const std::string& value) {
    if (!fields_.empty()) fields_ += ", ";
    fields_ += std::string("\"") + name + "\": " + value;
    return *this;
  }
  std::string fields_;
};

}  // namespace halfwire::two_gpu
