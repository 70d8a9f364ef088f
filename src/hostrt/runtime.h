// Streams, events and hardware queues of the host runtime.
//
// A stream is a FIFO with one worker thread. Everything that orders work is a *position*: (stream, number of
// the entry), done once the stream has completed that many entries. An event is the position of its last
// record, so a wait that copied the position is untouched by a later record.
//
// Hardware queues (Options::hardware_queues = K > 0): the streams of a device share K queues; an entry starts
// only at the head of its queue, and leaves it when it starts. So an entry that must wait (for the entry
// before it in its stream, or for an event) holds up entries of other streams behind it, as on a GPU.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "abi/cuda_runtime.h"
#include "hostrt/options.h"

namespace halfwire::hostrt {

class Stream;
using StreamPointer = std::shared_ptr<Stream>;

// The place behind an entry of a stream; a default one counts as reached.
struct Position {
  StreamPointer stream;
  uint64_t number = 0;
};

// When a recorded event was reached, written by the stream's worker.
struct Stamp {
  std::optional<int64_t> nanoseconds;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  Position last;
  std::shared_ptr<Stamp> stamp;  // none with cudaEventDisableTiming
};

// All streams and events of the process. Thread-safe: one lock, never held while work runs.
class Runtime {
 public:
  explicit Runtime(const Options& options);

  int deviceCount() const { return options_.devices; }
  void setRank(int rank);

  cudaError_t createStream(int device, unsigned flags, cudaStream_t* out);
  cudaError_t destroyStream(cudaStream_t handle);
  // Appends an entry; `work` may be empty. Returns before the work starts.
  cudaError_t enqueue(cudaStream_t handle, std::function<void()> work);
  cudaError_t synchronizeStream(cudaStream_t handle);
  cudaError_t queryStream(cudaStream_t handle);
  cudaError_t synchronizeDevice(int device);
  cudaError_t checkStream(cudaStream_t handle);

  cudaError_t createEvent(int device, unsigned flags, cudaEvent_t* out);
  cudaError_t destroyEvent(cudaEvent_t handle);
  cudaError_t recordEvent(cudaEvent_t handle, cudaStream_t stream);
  cudaError_t waitEvent(cudaStream_t stream, cudaEvent_t handle);
  cudaError_t queryEvent(cudaEvent_t handle);
  cudaError_t synchronizeEvent(cudaEvent_t handle);
  cudaError_t elapsed(float* ms, cudaEvent_t start, cudaEvent_t end);

  // Options::trace: writes what every entry did, docs/meter.md. Called once, at exit.
  void writeTrace();

  // Starts no further entry and waits for running ones, 200 ms at most: at process exit, before the program's
  // static objects go away under the workers.
  void stop();
  // Whether any worker thread was ever started.
  bool hasThreads();
  // In a child after fork, where only the calling thread exists: makes the lock usable.
  void resetLockInChild();

 private:
  friend class Stream;
  enum class Kind : char { kWork = 'w', kRecord = 'r', kWait = 'a' };
  struct Entry {
    std::function<void()> work;
    std::vector<Position> after;
    std::shared_ptr<Stamp> stamp;
    Kind kind = Kind::kWork;
    int64_t enqueued_ns = 0;  // these only with Options::trace
  };
  // What an entry did, on the steady clock.
  struct Traced {
    uint32_t stream;
    Kind kind;
    // Reached: it was at the head of its stream and the stream had time for it.
    int64_t enqueued_ns, reached_ns, started_ns, ended_ns;
  };
  struct Device {
    StreamPointer legacy;
    std::vector<StreamPointer> streams;       // all that may have work, the legacy one included
    std::vector<std::deque<Stream*>> queues;  // per entry in order of issue, its stream
  };
  using Lock = std::unique_lock<std::mutex>;

  StreamPointer makeStreamLocked(int device, unsigned flags);
  StreamPointer findLocked(cudaStream_t handle);
  Event* findEventLocked(cudaEvent_t handle);
  Position enqueueLocked(const StreamPointer& stream, Entry entry);
  std::vector<Position> implicitLocked(const StreamPointer& stream);
  std::vector<Position> pendingLocked(const StreamPointer& stream);
  static bool reached(const Position& position);
  bool readyLocked(const StreamPointer& stream);
  void waitLocked(Lock& lock, const std::vector<Position>& positions);
  void work(StreamPointer stream);
  void delay(Lock& lock, const Stream& stream);

  const Options options_;
  std::mutex mutex_;
  std::condition_variable host_;  // host threads that wait for positions
  int host_waiters_ = 0;
  int running_ = 0;
  bool stopping_ = false;
  bool threads_ = false;
  int rank_;
  uint32_t next_stream_ = 0;
  std::vector<Device> devices_;
  std::unordered_map<cudaStream_t, StreamPointer> streams_;
  std::unordered_map<cudaEvent_t, std::unique_ptr<Event>> events_;
  std::deque<Traced> traced_;  // grows without moving: a pause here would show in the times
};

// The device of the calling thread, and whether it runs a host function (from which CUDA allows no CUDA
// call).
int& currentDevice();
bool& insideHostFunction();

}  // namespace halfwire::hostrt
