#include "hostrt/runtime.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <string>
#include <system_error>
#include <thread>

namespace halfwire::hostrt {

class Stream {
 public:
  int device = 0;
  unsigned flags = 0;
  uint32_t index = 0;
  int queue = -1;  // hardware queue, -1 = its own
  bool legacy = false;
  bool started = false;  // a worker exists
  bool closing = false;
  uint64_t enqueued = 0;
  uint64_t completed = 0;
  std::deque<Runtime::Entry> entries;
  std::condition_variable wake;
  std::vector<StreamPointer> dependents;  // workers to wake when an entry completes

  bool blocking() const { return (flags & cudaStreamNonBlocking) == 0; }
};

namespace {

// The calling thread's cudaStreamPerThread, one per device; they close when the thread ends.
struct PerThreadStreams {
  std::map<int, cudaStream_t> handles;
  Runtime* runtime = nullptr;
  ~PerThreadStreams() {
    for (const auto& [device, handle] : handles) runtime->destroyStream(handle);
  }
};
thread_local PerThreadStreams per_thread_streams;

constexpr size_t kMostTraced = size_t{1} << 24;  // entries that a trace keeps

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

int64_t nowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Starts a detached thread that takes no signal of the program's.
bool startThread(std::function<void()> body) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  bool ok = true;
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error&) {
    ok = false;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return ok;
}

}  // namespace

int& currentDevice() {
  thread_local int device = 0;
  return device;
}

bool& insideHostFunction() {
  thread_local bool inside = false;
  return inside;
}

Runtime::Runtime(const Options& options) : options_(options), rank_(options.rank), devices_(options.devices) {
  for (Device& device : devices_) device.queues.resize(static_cast<size_t>(options.hardware_queues));
}

void Runtime::setRank(int rank) {
  Lock lock(mutex_);
  rank_ = rank;
}

StreamPointer Runtime::makeStreamLocked(int device, unsigned flags) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->flags = flags;
  stream->index = next_stream_++;
  if (options_.hardware_queues > 0)
    stream->queue = static_cast<int>(stream->index) % options_.hardware_queues;
  devices_[static_cast<size_t>(device)].streams.push_back(stream);
  return stream;
}

cudaError_t Runtime::createStream(int device, unsigned flags, cudaStream_t* out) {
  if (out == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0) return cudaErrorInvalidValue;
  Lock lock(mutex_);
  StreamPointer stream = makeStreamLocked(device, flags);
  *out = reinterpret_cast<cudaStream_t>(stream.get());
  streams_.emplace(*out, std::move(stream));
  return cudaSuccess;
}

cudaError_t Runtime::destroyStream(cudaStream_t handle) {
  Lock lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return cudaErrorInvalidResourceHandle;
  const StreamPointer stream = found->second;
  streams_.erase(found);
  stream->closing = true;
  if (stream->started) {
    stream->wake.notify_all();  // the worker finishes what is queued, then leaves
  } else {
    std::erase(devices_[static_cast<size_t>(stream->device)].streams, stream);
  }
  return cudaSuccess;
}

StreamPointer Runtime::findLocked(cudaStream_t handle) {
  const int device = currentDevice();
  if (handle == nullptr || handle == cudaStreamLegacy) {
    Device& state = devices_[static_cast<size_t>(device)];
    if (!state.legacy) {
      state.legacy = makeStreamLocked(device, cudaStreamDefault);
      state.legacy->legacy = true;
    }
    return state.legacy;
  }
  if (handle == cudaStreamPerThread) {
    PerThreadStreams& mine = per_thread_streams;
    mine.runtime = this;
    const auto found = mine.handles.find(device);
    if (found != mine.handles.end()) return streams_.at(found->second);
    StreamPointer stream = makeStreamLocked(device, cudaStreamDefault);
    const auto made = reinterpret_cast<cudaStream_t>(stream.get());
    mine.handles[device] = made;
    streams_.emplace(made, stream);
    return stream;
  }
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

cudaError_t Runtime::checkStream(cudaStream_t handle) {
  Lock lock(mutex_);
  return findLocked(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

bool Runtime::reached(const Position& position) {
  return position.stream == nullptr || position.stream->completed >= position.number;
}

// The legacy stream waits for all blocking streams of its device, and they wait for it.
std::vector<Position> Runtime::implicitLocked(const StreamPointer& stream) {
  std::vector<Position> after;
  const Device& device = devices_[static_cast<size_t>(stream->device)];
  const auto add = [&](const StreamPointer& other) {
    if (other->completed < other->enqueued) after.push_back({other, other->enqueued});
  };
  if (stream->legacy) {
    for (const StreamPointer& other : device.streams) {
      if (other != stream && other->blocking()) add(other);
    }
  } else if (stream->blocking() && device.legacy) {
    add(device.legacy);
  }
  return after;
}

// What a host thread that synchronises with `stream` waits for.
std::vector<Position> Runtime::pendingLocked(const StreamPointer& stream) {
  std::vector<Position> pending;
  if (stream->legacy) pending = implicitLocked(stream);
  if (stream->completed < stream->enqueued) pending.push_back({stream, stream->enqueued});
  return pending;
}

Position Runtime::enqueueLocked(const StreamPointer& stream, Entry entry) {
  if (!options_.trace.empty()) entry.enqueued_ns = nowNanoseconds();
  for (Position& position : implicitLocked(stream)) entry.after.push_back(std::move(position));
  stream->entries.push_back(std::move(entry));
  ++stream->enqueued;
  if (stream->queue >= 0) {
    devices_[static_cast<size_t>(stream->device)].queues[static_cast<size_t>(stream->queue)].push_back(
        stream.get());
  }
  if (!stream->started) {
    stream->started = true;
    threads_ = true;
    if (!startThread([this, stream] { work(stream); })) {
      // Without a worker nothing would ever run; the entry is undone and the caller told.
      stream->started = false;
      stream->entries.pop_back();
      --stream->enqueued;
      if (stream->queue >= 0) {
        devices_[static_cast<size_t>(stream->device)].queues[static_cast<size_t>(stream->queue)].pop_back();
      }
      return {};
    }
  } else {
    stream->wake.notify_all();
  }
  return {stream, stream->enqueued};
}

cudaError_t Runtime::enqueue(cudaStream_t handle, std::function<void()> work) {
  Lock lock(mutex_);
  const StreamPointer stream = findLocked(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  return enqueueLocked(stream, {std::move(work), {}, nullptr}).stream ? cudaSuccess
                                                                      : cudaErrorMemoryAllocation;
}

bool Runtime::readyLocked(const StreamPointer& stream) {
  if (stopping_) return false;
  if (stream->queue >= 0) {
    const auto& queue =
        devices_[static_cast<size_t>(stream->device)].queues[static_cast<size_t>(stream->queue)];
    if (queue.front() != stream.get()) return false;
  }
  for (const Position& position : stream->entries.front().after) {
    if (reached(position)) continue;
    auto& dependents = position.stream->dependents;
    if (std::find(dependents.begin(), dependents.end(), stream) == dependents.end())
      dependents.push_back(stream);
    return false;
  }
  return true;
}

void Runtime::delay(Lock& lock, const Stream& stream) {
  if (options_.delay_us == 0) return;
  const uint64_t key = mix(options_.seed ^ mix(static_cast<uint64_t>(rank_))) ^
                       mix((uint64_t{stream.index} << 40) ^ (stream.completed + 1));
  const auto us = static_cast<int64_t>(mix(key) % static_cast<uint64_t>(options_.delay_us + 1));
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(us));
  lock.lock();
}

void Runtime::work(StreamPointer stream) {
  // A new thread inherits its creator's rounding and flush modes; work must not depend on who came first.
  fesetenv(FE_DFL_ENV);
  currentDevice() = stream->device;
  Lock lock(mutex_);
  // Whom the completed entries may concern is woken before this worker pauses and not after each entry:
  // whoever is woken takes the processor, while a device's stream would have gone on to its next record.
  std::vector<StreamPointer> dependents;
  bool completed = false;
  const auto wakeOthers = [&] {
    for (const StreamPointer& dependent : dependents) dependent->wake.notify_all();
    dependents.clear();
    if (completed && (host_waiters_ > 0 || stopping_)) host_.notify_all();
    completed = false;
  };
  for (;;) {
    if (stream->entries.empty()) {
      wakeOthers();
      stream->wake.wait(lock, [&] { return !stream->entries.empty() || stream->closing; });
    }
    if (stream->entries.empty()) break;
    if (options_.delay_us > 0) wakeOthers();
    const int64_t reached = options_.trace.empty() ? 0 : nowNanoseconds();
    delay(lock, *stream);
    if (!readyLocked(stream)) {
      wakeOthers();
      stream->wake.wait(lock, [&] { return readyLocked(stream); });
    }
    Entry entry = std::move(stream->entries.front());
    stream->entries.pop_front();
    if (stream->queue >= 0) {
      auto& queue = devices_[static_cast<size_t>(stream->device)].queues[static_cast<size_t>(stream->queue)];
      queue.pop_front();
      if (!queue.empty()) queue.front()->wake.notify_all();
    }
    const int64_t started = options_.trace.empty() ? 0 : nowNanoseconds();
    if (entry.work) {
      wakeOthers();
      ++running_;
      lock.unlock();
      insideHostFunction() = true;
      entry.work();
      insideHostFunction() = false;
      entry.work = nullptr;
      lock.lock();
      --running_;
    }
    if (entry.stamp) entry.stamp->nanoseconds = nowNanoseconds();
    if (!options_.trace.empty() && traced_.size() < kMostTraced)
      traced_.push_back({stream->index, entry.kind, entry.enqueued_ns, reached, started, nowNanoseconds()});
    ++stream->completed;
    completed = true;
    for (StreamPointer& dependent : std::exchange(stream->dependents, {}))
      dependents.push_back(std::move(dependent));
  }
  std::erase(devices_[static_cast<size_t>(stream->device)].streams, stream);
}

void Runtime::waitLocked(Lock& lock, const std::vector<Position>& positions) {
  ++host_waiters_;
  for (const Position& position : positions) {
    host_.wait(lock, [&] { return reached(position); });
  }
  --host_waiters_;
}

cudaError_t Runtime::synchronizeStream(cudaStream_t handle) {
  Lock lock(mutex_);
  const StreamPointer stream = findLocked(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  waitLocked(lock, pendingLocked(stream));
  return cudaSuccess;
}

cudaError_t Runtime::queryStream(cudaStream_t handle) {
  Lock lock(mutex_);
  const StreamPointer stream = findLocked(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  return pendingLocked(stream).empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t Runtime::synchronizeDevice(int device) {
  Lock lock(mutex_);
  std::vector<Position> pending;
  for (const StreamPointer& stream : devices_[static_cast<size_t>(device)].streams) {
    if (stream->completed < stream->enqueued) pending.push_back({stream, stream->enqueued});
  }
  waitLocked(lock, pending);
  return cudaSuccess;
}

cudaError_t Runtime::createEvent(int device, unsigned flags, cudaEvent_t* out) {
  if (out == nullptr || (flags & ~unsigned{cudaEventBlockingSync | cudaEventDisableTiming}) != 0) {
    return cudaErrorInvalidValue;
  }
  auto event = std::make_unique<Event>();
  event->device = device;
  event->flags = flags;
  Lock lock(mutex_);
  *out = reinterpret_cast<cudaEvent_t>(event.get());
  events_.emplace(*out, std::move(event));
  return cudaSuccess;
}

cudaError_t Runtime::destroyEvent(cudaEvent_t handle) {
  Lock lock(mutex_);
  return events_.erase(handle) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

Event* Runtime::findEventLocked(cudaEvent_t handle) {
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second.get();
}

cudaError_t Runtime::recordEvent(cudaEvent_t handle, cudaStream_t stream_handle) {
  Lock lock(mutex_);
  Event* event = findEventLocked(handle);
  const StreamPointer stream = findLocked(stream_handle);
  if (event == nullptr || !stream || event->device != stream->device) return cudaErrorInvalidResourceHandle;
  std::shared_ptr<Stamp> stamp;
  if ((event->flags & cudaEventDisableTiming) == 0) stamp = std::make_shared<Stamp>();
  Position position = enqueueLocked(stream, {nullptr, {}, stamp, Kind::kRecord});
  if (!position.stream) return cudaErrorMemoryAllocation;
  event->recorded = true;
  event->last = std::move(position);
  event->stamp = std::move(stamp);
  return cudaSuccess;
}

cudaError_t Runtime::waitEvent(cudaStream_t stream_handle, cudaEvent_t handle) {
  Lock lock(mutex_);
  const Event* event = findEventLocked(handle);
  const StreamPointer stream = findLocked(stream_handle);
  if (event == nullptr || !stream) return cudaErrorInvalidResourceHandle;
  if (reached(event->last)) return cudaSuccess;
  return enqueueLocked(stream, {nullptr, {event->last}, nullptr, Kind::kWait}).stream
             ? cudaSuccess
             : cudaErrorMemoryAllocation;
}

cudaError_t Runtime::queryEvent(cudaEvent_t handle) {
  Lock lock(mutex_);
  const Event* event = findEventLocked(handle);
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  return reached(event->last) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t Runtime::synchronizeEvent(cudaEvent_t handle) {
  Lock lock(mutex_);
  const Event* event = findEventLocked(handle);
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  waitLocked(lock, {event->last});
  return cudaSuccess;
}

cudaError_t Runtime::elapsed(float* ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  if (ms == nullptr) return cudaErrorInvalidValue;
  Lock lock(mutex_);
  const Event* start = findEventLocked(start_handle);
  const Event* end = findEventLocked(end_handle);
  if (start == nullptr || end == nullptr || !start->stamp || !end->stamp || start->device != end->device) {
    return cudaErrorInvalidResourceHandle;
  }
  if (!start->stamp->nanoseconds || !end->stamp->nanoseconds) return cudaErrorNotReady;
  *ms = static_cast<float>(static_cast<double>(*end->stamp->nanoseconds - *start->stamp->nanoseconds) * 1e-6);
  return cudaSuccess;
}

void Runtime::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  host_.wait_for(lock, std::chrono::milliseconds(200), [&] { return running_ == 0; });
}

void Runtime::writeTrace() {
  Lock lock(mutex_);
  if (options_.trace.empty()) return;
  const std::string path =
      options_.trace + "/streams-" + std::to_string(rank_) + "-" + std::to_string(getpid()) + ".txt";
  std::FILE* file = std::fopen(path.c_str(), "wxe");
  if (file == nullptr) return;
  for (const Traced& t : traced_) {
    std::fprintf(file, "%u %c %lld %lld %lld %lld\n", t.stream, static_cast<char>(t.kind),
                 static_cast<long long>(t.enqueued_ns), static_cast<long long>(t.reached_ns),
                 static_cast<long long>(t.started_ns), static_cast<long long>(t.ended_ns));
  }
  std::fclose(file);
}

bool Runtime::hasThreads() {
  Lock lock(mutex_);
  return threads_;
}

void Runtime::resetLockInChild() { new (&mutex_) std::mutex; }

}  // namespace halfwire::hostrt
