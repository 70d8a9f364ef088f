// The exposure meter of a process: brackets waits for collectives with two timed events on the waiting
// stream, in sampled steps, and reads them at a later step's begin, on the program's own thread. Writes what
// it finds into the run log.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "abi/cuda_runtime.h"
#include "meter/hooks.h"
#include "meter/steps.h"
#include "meter/tracker.h"

namespace halfwire::meter {

// The real functions of one CUDA runtime that the meter itself calls. All are set.
struct CudaCalls {
  cudaError_t (*eventCreate)(cudaEvent_t* event, unsigned flags) = nullptr;
  cudaError_t (*eventRecord)(cudaEvent_t event, cudaStream_t stream) = nullptr;
  cudaError_t (*eventQuery)(cudaEvent_t event) = nullptr;
  cudaError_t (*eventElapsed)(float* ms, cudaEvent_t start, cudaEvent_t end) = nullptr;
  cudaError_t (*isCapturing)(cudaStream_t stream, cudaStreamCaptureStatus* status) = nullptr;
  cudaError_t (*exchangeCaptureMode)(cudaStreamCaptureMode* mode) = nullptr;
  cudaError_t (*getDevice)(int* device) = nullptr;
  cudaError_t (*peekLastError)() = nullptr;
  cudaError_t (*getLastError)() = nullptr;
  cudaError_t (*streamFlags)(cudaStream_t stream, unsigned* flags) = nullptr;  // may be null
};

// What a handle means on the calling thread: the default streams have several names, and one for each thread.
StreamKey keyOf(cudaStream_t stream);

// A pair of timed events around something on one stream.
struct Bracket {
  cudaEvent_t before = nullptr;
  cudaEvent_t after = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t awaited = nullptr;  // the program's; null around a collective
  const CudaCalls* cuda = nullptr;
  CollectiveId id = 0;
  int device = 0;
  int64_t opened_ns = 0;  // host time before the first event was recorded
  int64_t lag_ns = 0;     // what of the time between the events was the host's, see close()
  bool passed = false;    // what is awaited had happened before the second event was recorded
  int64_t host_ns = 0;  // how long the host took for all of it, where the stream did not wait for it; else 0
  bool interrupted = false;  // that was too long for anything to be said
  std::atomic<bool> closed{false};
};

inline constexpr uint32_t kWarmupSteps = 10;

// Thread-safe. No lock is held across a call into CUDA or NCCL.
class Meter {
 public:
  Meter();

  // Starts counting into `log`. Refuses, with the reason in the log, where timed events would change what
  // they measure.
  void start(RunLogFile* log, uint32_t every);
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void stop() { on_.store(false, std::memory_order_relaxed); }

  // NCCL's side. Brackets of collectives on compute streams are open between the two.
  void beginCollectives(const MeterCall* calls, size_t count, MeterScope* scope);
  void endCollectives(MeterScope* scope);
  void step();
  // A range of the program's begins that may be a step's; halfwire_step() makes them all be ignored. The
  // first name counts, until its ranges have stopped.
  void range(std::string_view name);

  // CUDA's side: before the real call. `stream` is what the real function gets, `key` names it.
  void launches(StreamKey key, uint64_t count);
  void copied(StreamKey key);
  void record(const CudaCalls& cuda, EventKey event, StreamKey key);
  Bracket* beginWait(const CudaCalls& cuda, EventKey event, cudaStream_t stream, StreamKey key);
  // `called_ns`: host time before the real call; `clean`: that succeeded.
  void close(Bracket* bracket, int64_t called_ns, bool clean);
  void streamDestroyed(StreamKey key);

  // Host waits: what is being waited for, and afterwards how long it took.
  bool hostWaitsEvent(EventKey event);
  bool hostWaitsStream(StreamKey key);
  bool hostWaitsAll();
  void hostWaited(bool behind, int64_t nanoseconds);

 private:
  struct Batch {
    uint64_t step = 0;
    std::vector<Bracket*> brackets;
  };
  struct Totals {
    uint64_t asked = 0, ring = 0, sent = 0, calls = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  Bracket* open(Lock& lock, const CudaCalls& cuda, cudaStream_t stream, cudaEvent_t awaited, CollectiveId id);
  void noteBlocking(Lock& lock, cudaStream_t stream);
  bool grow(Lock& lock, const CudaCalls& cuda, int device);
  void boundary(Lock& lock, int64_t now);
  void forgetStep();
  void readPending(Lock& lock);
  bool read(const Batch& batch, std::vector<std::pair<CollectiveId, uint64_t>>* exposed, uint64_t* total);
  Totals totals() const;
  bool sampled(uint64_t step) const;

  static constexpr size_t kRows = 1 << 14;
  static constexpr size_t kDevices = 16;
  static constexpr size_t kMostBrackets = 8192;
  static constexpr size_t kBlock = 128;
  // Ranges that have not come for so many collectives, or for as many as this many of the longest steps had,
  // have stopped.
  static constexpr uint64_t kRangeCalls = 4096;
  static constexpr uint64_t kRangeSteps = 64;

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  RunLogFile* log_ = nullptr;
  uint32_t every_ = 16;
  Tracker tracker_;
  StepFinder finder_;
  bool marked_ = false;        // the program says where steps begin
  bool ranged_ = false;        // its ranges do
  uint64_t since_range_ = 0;   // collectives since the last of them ...
  uint64_t most_between_ = 0;  // ... and the most between two
  CollectiveId next_id_ = 0;
  std::vector<RunLogSize*> rows_;
  std::array<cudaStream_t, 32> flags_asked_{};  // streams whose flags are known
  size_t flags_next_ = 0;
  const CudaCalls* last_cuda_ = nullptr;  // the runtime whose events the program uses

  bool in_step_ = false;
  bool sampling_ = false;
  uint64_t step_ = 0;
  uint64_t started_ = 0;
  int64_t begin_ns_ = 0;
  Totals begin_totals_;
  Batch batch_;
  std::deque<Batch> pending_;
  uint32_t unmeasured_ = 0;
  uint32_t fired_ = 0;  // waits of this step for what had happened already
  std::array<std::vector<Bracket*>, kDevices> free_;
  size_t made_ = 0;
  bool reading_ = false;
  std::atomic<uint64_t> host_blocked_ns_{0};
  std::atomic<uint64_t> host_behind_ns_{0};
};

}  // namespace halfwire::meter
