#include "meter/meter.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <tuple>

namespace halfwire::meter {
namespace {

int64_t nowNs() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void add(std::atomic<uint64_t>& counter, uint64_t by) { counter.fetch_add(by, std::memory_order_relaxed); }

// More than the calls of one bracket take, and more than 2 % of what they enclose: the host was interrupted
// between them.
constexpr int64_t kMostHostTime = 50'000;

uint64_t get(const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); }

// Which step of a run of `every` is sampled: not always the same one, which a schedule of the program could
// follow.
uint64_t pick(uint64_t run, uint64_t every) {
  uint64_t x = run + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x ^ (x >> 31)) % every;
}

// Lets calls that are unsafe while another thread captures a graph be made, without disturbing that graph.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaCalls& cuda) : cuda_(cuda) { (void)cuda_.exchangeCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cuda_.exchangeCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const CudaCalls& cuda_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Records without leaving an error of ours behind for the program.
bool recordQuietly(const CudaCalls& cuda, cudaEvent_t event, cudaStream_t stream) {
  if (cuda.eventRecord(event, stream) == cudaSuccess) return true;
  (void)cuda.getLastError();
  return false;
}

// Whether the event has completed, or was never recorded. Also while another thread captures a graph.
bool fired(const CudaCalls& cuda, cudaEvent_t event) {
  const RelaxedCapture relaxed(cuda);
  if (cuda.eventQuery(event) == cudaSuccess) return true;
  (void)cuda.getLastError();
  return false;
}

bool isSet(const char* name, std::string_view value) {
  const char* text = std::getenv(name);
  return text != nullptr && text == value;
}

}  // namespace

StreamKey keyOf(cudaStream_t stream) {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t thread = threads.fetch_add(1, std::memory_order_relaxed);
  if (stream == nullptr || stream == cudaStreamLegacy) return kLegacyStream;
  if (stream == cudaStreamPerThread) return kPerThreadBit | thread;
  return reinterpret_cast<StreamKey>(stream);
}

Meter::Meter() : rows_(kRows) {
  batch_.brackets.reserve(kMostBrackets);
  for (auto& list : free_) list.reserve(kBlock);
}

void Meter::start(RunLogFile* log, uint32_t every) {
  Lock lock(mutex_);
  if (log_ != nullptr) return;
  log_ = log;
  every_ = std::max(every, 1u);
  RunLogMeter& m = log->meter;
  m.every = every_;
  m.warmup = kWarmupSteps;
  const char* refusal = nullptr;
  if (isSet("CUDA_DEVICE_MAX_CONNECTIONS", "1")) {
    refusal =
        "CUDA_DEVICE_MAX_CONNECTIONS=1: timed events would keep collectives from running beside compute, so "
        "that the "
        "meter would change what it measures";
  } else if (isSet("CUDA_LAUNCH_BLOCKING", "1")) {
    refusal = "CUDA_LAUNCH_BLOCKING=1: nothing overlaps, so that times say nothing";
  }
  if (refusal != nullptr) {
    RunLog::setText(m.words, refusal);
    m.state.store(static_cast<uint32_t>(MeterState::kRefused));
    return;
  }
  m.state.store(static_cast<uint32_t>(MeterState::kOn));
  on_.store(true, std::memory_order_relaxed);
}

bool Meter::sampled(uint64_t step) const {
  // The step before the first that counts is sampled too: it makes the events.
  if (step + 1 < kWarmupSteps) return false;
  if (step < kWarmupSteps) return true;
  const uint64_t n = step - kWarmupSteps;
  return n % every_ == pick(n / every_, every_);
}

Meter::Totals Meter::totals() const {
  Totals t;
  const uint32_t used = std::min(log_->communicators.load(std::memory_order_relaxed), kRunLogCommunicators);
  for (uint32_t i = 0; i < used; ++i) {
    for (const RunLogRow& row : log_->communicator[i].rows) {
      if (row.key.load(std::memory_order_relaxed) == 0) break;
      t.asked += get(row.bytes_asked);
      t.ring += get(row.bytes_ring);
      t.sent += get(row.bytes_sent);
      t.calls += get(row.calls);
    }
  }
  return t;
}

// Ends the step that is running, if any, and begins the next one.
void Meter::boundary(Lock& lock, int64_t now) {
  const Totals t = totals();
  if (in_step_) {
    RunLogStep& s = log_->step[step_ % kRunLogSteps];
    s.number.store(0, std::memory_order_relaxed);
    s.measured.store(0, std::memory_order_relaxed);
    s.exposed_ns.store(0, std::memory_order_relaxed);
    s.begin_ns = static_cast<uint64_t>(begin_ns_);
    s.duration_ns = static_cast<uint64_t>(std::max<int64_t>(now - begin_ns_, 0));
    s.bytes_asked = t.asked - begin_totals_.asked;
    s.bytes_ring = t.ring - begin_totals_.ring;
    s.bytes_sent = t.sent - begin_totals_.sent;
    s.calls = t.calls - begin_totals_.calls;
    s.host_blocked_ns = host_blocked_ns_.exchange(0, std::memory_order_relaxed);
    s.host_behind_ns = host_behind_ns_.exchange(0, std::memory_order_relaxed);
    s.sampled = sampling_ ? 1 : 0;
    s.waits = static_cast<uint32_t>(batch_.brackets.size()) + fired_;
    s.unmeasured = unmeasured_;
    s.number.store(step_ + 1, std::memory_order_release);
    if (sampling_) {
      batch_.step = step_;
      pending_.push_back(std::move(batch_));
      batch_ = Batch{};
    }
    ++step_;
  }
  in_step_ = true;
  begin_ns_ = now;
  begin_totals_ = t;
  unmeasured_ = 0;
  fired_ = 0;
  host_blocked_ns_.store(0, std::memory_order_relaxed);
  host_behind_ns_.store(0, std::memory_order_relaxed);
  log_->meter.steps.store(step_ + 1, std::memory_order_relaxed);
  log_->meter.lost_marks.store(tracker_.lost(), std::memory_order_relaxed);
  sampling_ = false;  // nothing of this step is bracketed while the last one's events are read
  if (!pending_.empty() && !reading_) readPending(lock);
  sampling_ = sampled(step_);
  if (sampling_) batch_.brackets.reserve(kBlock);
}

// Exposed time of a batch whose events have all completed; false if one has not. Without the lock.
bool Meter::read(const Batch& batch, std::vector<std::pair<CollectiveId, uint64_t>>* exposed,
                 uint64_t* total) {
  struct Span {
    double begin, end;
    int device;
    CollectiveId id;
  };
  std::vector<Span> spans;
  std::array<Bracket*, kDevices> base{};
  // The last first: most likely to be unfinished.
  for (size_t i = batch.brackets.size(); i-- > 0;) {
    const Bracket& b = *batch.brackets[i];
    if (!b.closed.load(std::memory_order_acquire)) return false;
    if (b.cuda->eventQuery(b.after) != cudaSuccess) {
      (void)b.cuda->getLastError();
      return false;
    }
  }
  for (Bracket* b : batch.brackets) {
    if (b->id == 0) continue;  // refused by the runtime
    Bracket*& first = base[static_cast<size_t>(b->device)];
    if (first == nullptr) first = b;
    float from = 0;
    float length = 0;
    if ((b != first && b->cuda->eventElapsed(&from, first->before, b->before) != cudaSuccess) ||
        b->cuda->eventElapsed(&length, b->before, b->after) != cudaSuccess) {
      (void)b->cuda->getLastError();
      continue;
    }
    b->interrupted = b->host_ns > kMostHostTime && static_cast<double>(b->host_ns) > 0.02e6 * length;
    if (b->passed || b->interrupted) continue;
    spans.push_back({from + static_cast<double>(b->lag_ns) * 1e-6, double{from} + length, b->device, b->id});
  }
  // Each moment counts once, for the wait that began first; several devices of a process: the longest.
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.device, a.begin, a.end) < std::tie(b.device, b.begin, b.end);
  });
  double sum = 0;
  double longest = 0;
  double reached = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& s = spans[i];
    if (i == 0 || spans[i - 1].device != s.device) {
      sum = 0;
      reached = s.begin;
    }
    const double begin = std::max(s.begin, reached);
    if (s.end <= begin) continue;
    reached = s.end;
    sum += s.end - begin;
    longest = std::max(longest, sum);
    exposed->emplace_back(s.id, static_cast<uint64_t>((s.end - begin) * 1e6));
  }
  *total = static_cast<uint64_t>(longest * 1e6);
  return true;
}

void Meter::readPending(Lock& lock) {
  reading_ = true;
  while (!pending_.empty()) {
    Batch batch = std::move(pending_.front());
    pending_.pop_front();
    std::vector<std::pair<CollectiveId, uint64_t>> exposed;
    uint64_t total = 0;
    bool complete = true;
    lock.unlock();
    if (!batch.brackets.empty()) {
      const CudaCalls& cuda = *batch.brackets.front()->cuda;
      const RelaxedCapture relaxed(cuda);
      complete = cuda.peekLastError() == cudaSuccess && read(batch, &exposed, &total);
    }
    lock.lock();
    if (!complete) {
      pending_.push_front(std::move(batch));
      break;
    }
    const bool counts = batch.step >= kWarmupSteps;
    size_t measured = 0;
    uint32_t interrupted = 0;
    for (Bracket* b : batch.brackets) {
      const bool good = b->id != 0 && !b->interrupted;
      if (good) ++measured;
      if (b->id != 0 && b->interrupted) ++interrupted;
      RunLogSize* row = good ? rows_[b->id % kRows] : nullptr;
      if (counts && row != nullptr) add(row->waits, 1);
      free_[static_cast<size_t>(b->device)].push_back(b);
    }
    for (const auto& [id, ns] : exposed) {
      RunLogSize* row = rows_[id % kRows];
      if (counts && row != nullptr) add(row->exposed_ns, ns);
    }
    add(log_->meter.waits, measured);
    add(log_->meter.unmeasured, interrupted);
    RunLogStep& s = log_->step[batch.step % kRunLogSteps];
    if (counts && get(s.number) == batch.step + 1) {
      s.unmeasured += interrupted;
      s.exposed_ns.store(total, std::memory_order_relaxed);
      s.measured.store(1, std::memory_order_release);
    }
  }
  reading_ = false;
}

bool Meter::grow(Lock& lock, const CudaCalls& cuda, int device) {
  if (made_ + kBlock > kMostBrackets) return false;
  made_ += kBlock;
  lock.unlock();
  std::vector<Bracket*> block;
  block.reserve(kBlock);
  {
    const RelaxedCapture relaxed(cuda);
    for (size_t i = 0; i < kBlock; ++i) {
      auto bracket = std::make_unique<Bracket>();
      if (cuda.eventCreate(&bracket->before, cudaEventDefault) != cudaSuccess ||
          cuda.eventCreate(&bracket->after, cudaEventDefault) != cudaSuccess) {
        (void)cuda.getLastError();
        break;
      }
      bracket->cuda = &cuda;
      bracket->device = device;
      block.push_back(bracket.release());  // lives until the process ends
    }
  }
  lock.lock();
  auto& list = free_[static_cast<size_t>(device)];
  list.insert(list.end(), block.begin(), block.end());
  return !list.empty();
}

// Records the first event; null where that cannot be done.
Bracket* Meter::open(Lock& lock, const CudaCalls& cuda, cudaStream_t stream, cudaEvent_t awaited,
                     CollectiveId id) {
  lock.unlock();
  int device = -1;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // An error of the program's that it has not asked for yet must stay what it is.
  const bool clean = cuda.peekLastError() == cudaSuccess;
  bool capturing = false;
  if (clean) {
    if (cuda.isCapturing(stream, &status) != cudaSuccess) {
      capturing = true;
      (void)cuda.getLastError();
    }
    capturing = capturing || status != cudaStreamCaptureStatusNone;
    if (!capturing && awaited != nullptr && fired(cuda, awaited)) {
      // No stream waits for what has happened.
      lock.lock();
      add(log_->meter.waits, 1);
      if (sampling_) ++fired_;
      RunLogSize* row = rows_[id % kRows];
      if (sampling_ && step_ >= kWarmupSteps && row != nullptr) add(row->waits, 1);
      return nullptr;
    }
    if (!capturing && cuda.getDevice(&device) != cudaSuccess) (void)cuda.getLastError();
  }
  lock.lock();
  if (!sampling_) return nullptr;  // another thread has begun the next step
  if (capturing) {
    add(log_->meter.captured, 1);
    return nullptr;
  }
  if (device < 0 || device >= static_cast<int>(kDevices) ||
      (free_[static_cast<size_t>(device)].empty() && !grow(lock, cuda, device)) || !sampling_) {
    ++unmeasured_;
    add(log_->meter.unmeasured, 1);
    return nullptr;
  }
  auto& list = free_[static_cast<size_t>(device)];
  if (list.empty()) return nullptr;
  Bracket* b = list.back();
  list.pop_back();
  b->stream = stream;
  b->awaited = awaited;
  b->cuda = &cuda;
  b->id = id;
  b->closed.store(false, std::memory_order_relaxed);
  batch_.brackets.push_back(b);
  lock.unlock();
  b->opened_ns = nowNs();
  if (!recordQuietly(cuda, b->before, stream)) b->id = 0;
  lock.lock();
  return b;
}

// A stream that has run dry passes the first event at once, long before the host has enqueued what it
// brackets: until then it does not wait for a collective but for the host. Whether that was so, the first
// event says by having completed already; then the time from the one call to the other is taken off.
void Meter::close(Bracket* b, int64_t called_ns, bool clean) {
  b->lag_ns = 0;
  b->passed = false;
  b->interrupted = false;
  b->host_ns = 0;
  // The program's error stays its last error; nothing is measured then.
  if (!clean || (b->id != 0 && b->cuda->peekLastError() != cudaSuccess)) b->id = 0;
  if (b->id != 0 && b->awaited != nullptr) b->passed = fired(*b->cuda, b->awaited);
  if (b->id != 0 && !recordQuietly(*b->cuda, b->after, b->stream)) b->id = 0;
  const int64_t took = nowNs() - b->opened_ns;
  if (b->id != 0) {
    if (fired(*b->cuda, b->before)) {
      b->lag_ns = called_ns - b->opened_ns;
      b->host_ns = took;
      if (b->awaited == nullptr) b->passed = fired(*b->cuda, b->after);
    }
  }
  if (b->id == 0) add(log_->meter.unmeasured, 1);
  b->closed.store(true, std::memory_order_release);
}

// The legacy stream waits for blocking streams by itself: there is no call to bracket, and the report says
// so.
void Meter::noteBlocking(Lock& lock, cudaStream_t stream) {
  if (last_cuda_ == nullptr || last_cuda_->streamFlags == nullptr || keyOf(stream) == kLegacyStream ||
      stream == cudaStreamPerThread)
    return;
  if (std::find(flags_asked_.begin(), flags_asked_.end(), stream) != flags_asked_.end()) return;
  flags_asked_[flags_next_++ % flags_asked_.size()] = stream;
  const CudaCalls& cuda = *last_cuda_;
  lock.unlock();
  unsigned flags = cudaStreamNonBlocking;
  if (cuda.peekLastError() == cudaSuccess && cuda.streamFlags(stream, &flags) != cudaSuccess) {
    (void)cuda.getLastError();
    flags = cudaStreamNonBlocking;
  }
  lock.lock();
  if ((flags & cudaStreamNonBlocking) == 0) add(log_->meter.blocking, 1);
}

// What was begun as a step is none. Its events are read all the same.
void Meter::forgetStep() {
  if (!in_step_) return;
  in_step_ = false;
  sampling_ = false;
  pending_.push_back(std::move(batch_));
  pending_.back().step = 0;
  batch_ = Batch{};
}

void Meter::beginCollectives(const MeterCall* calls, size_t count, MeterScope* scope) {
  scope->count = 0;
  if (!on()) return;
  Lock lock(mutex_);
  add(log_->meter.collectives, count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t now = nowNs();
    const bool begins = finder_.onCollective(calls[i].kind, now);
    if (ranged_ && ++since_range_ > (most_between_ == 0 ? kRangeCalls : kRangeSteps * most_between_)) {
      // The ranges have stopped, as those of a window that was profiled.
      ranged_ = false;
      most_between_ = 0;
      forgetStep();
    }
    if (!marked_ && !ranged_) {
      log_->meter.checked.store(finder_.checked(), std::memory_order_relaxed);
      log_->meter.predicted.store(finder_.predicted(), std::memory_order_relaxed);
      if (begins) {
        log_->meter.source.store(static_cast<uint32_t>(StepSource::kDetected), std::memory_order_relaxed);
        boundary(lock, now);
      } else if (in_step_ && !finder_.found()) {
        forgetStep();  // the sequence is another one now
      }
    }
    const CollectiveId id = ++next_id_;
    rows_[id % kRows] = calls[i].row;
    if (sampling_ && step_ >= kWarmupSteps && calls[i].row != nullptr) add(calls[i].row->sampled_calls, 1);
    const auto stream = static_cast<cudaStream_t>(calls[i].stream);
    noteBlocking(lock, stream);
    if (!tracker_.onCollective(keyOf(stream), id) || !sampling_ || last_cuda_ == nullptr) continue;
    bool open_already = false;
    for (int k = 0; k < scope->count; ++k) {
      auto* b = static_cast<Bracket*>(scope->slots[k]);
      if (b->stream != stream) continue;
      b->id = b->id != 0 ? id : 0;
      open_already = true;
    }
    if (open_already || scope->count == MeterScope::kMost) continue;
    if (Bracket* b = open(lock, *last_cuda_, stream, nullptr, id)) scope->slots[scope->count++] = b;
  }
  if (scope->count > 0) scope->called_ns = nowNs();
}

void Meter::endCollectives(MeterScope* scope) {
  for (int k = 0; k < scope->count; ++k)
    close(static_cast<Bracket*>(scope->slots[k]), scope->called_ns, true);
  scope->count = 0;
}

void Meter::step() {
  if (!on()) return;
  const int64_t now = nowNs();
  Lock lock(mutex_);
  if (!marked_) {
    // Steps found before the program spoke were guesses.
    marked_ = true;
    log_->meter.source.store(static_cast<uint32_t>(StepSource::kMarked), std::memory_order_relaxed);
    log_->meter.checked.store(0, std::memory_order_relaxed);
    log_->meter.predicted.store(0, std::memory_order_relaxed);
  }
  boundary(lock, now);
}

void Meter::range(std::string_view name) {
  if (!on()) return;
  const int64_t now = nowNs();
  Lock lock(mutex_);
  if (marked_) return;
  RunLogMeter& m = log_->meter;
  if (!ranged_) {
    // Steps found before were guesses.
    ranged_ = true;
    RunLog::setText(m.range, std::string(name));
    m.source.store(static_cast<uint32_t>(StepSource::kRange), std::memory_order_relaxed);
    m.checked.store(0, std::memory_order_relaxed);
    m.predicted.store(0, std::memory_order_relaxed);
  } else {
    if (name != m.range) return;
    most_between_ = std::max(most_between_, since_range_);
  }
  since_range_ = 0;
  boundary(lock, now);
}

void Meter::launches(StreamKey key, uint64_t count) {
  const Lock lock(mutex_);
  tracker_.onLaunch(key, count);
}

void Meter::copied(StreamKey key) {
  const Lock lock(mutex_);
  tracker_.onCopy(key);
}

void Meter::record(const CudaCalls& cuda, EventKey event, StreamKey key) {
  const Lock lock(mutex_);
  last_cuda_ = &cuda;
  add(log_->meter.event_calls, 1);
  tracker_.onRecord(event, key);
}

Bracket* Meter::beginWait(const CudaCalls& cuda, EventKey event, cudaStream_t stream, StreamKey key) {
  Lock lock(mutex_);
  last_cuda_ = &cuda;
  add(log_->meter.event_calls, 1);
  const CollectiveId id = tracker_.onWait(key, event);
  if (id == 0 || !sampling_) return nullptr;
  return open(lock, cuda, stream, reinterpret_cast<cudaEvent_t>(event), id);
}

void Meter::streamDestroyed(StreamKey key) {
  const Lock lock(mutex_);
  tracker_.onStreamDestroy(key);
}

bool Meter::hostWaitsEvent(EventKey event) {
  const Lock lock(mutex_);
  add(log_->meter.event_calls, 1);
  return tracker_.onHostWaitEvent(event) != 0;
}

bool Meter::hostWaitsStream(StreamKey key) {
  const Lock lock(mutex_);
  add(log_->meter.event_calls, 1);
  return tracker_.onHostWaitStream(key) != 0;
}

bool Meter::hostWaitsAll() {
  const Lock lock(mutex_);
  add(log_->meter.event_calls, 1);
  return tracker_.onHostWaitAll() != 0;
}

void Meter::hostWaited(bool behind, int64_t nanoseconds) {
  add(host_blocked_ns_, static_cast<uint64_t>(std::max<int64_t>(nanoseconds, 0)));
  if (behind) add(host_behind_ns_, static_cast<uint64_t>(std::max<int64_t>(nanoseconds, 0)));
}

}  // namespace halfwire::meter
