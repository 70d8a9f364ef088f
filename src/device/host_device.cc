// Device on the host engine: jobs run as host functions on the engine's streams, with the host codec.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/slice.h"
#include "device/check_job.h"
#include "device/device.h"

namespace halfwire {
namespace {

constexpr size_t kInitialJobs = 64;

struct CopyJob {
  void* to;
  const void* from;
  size_t bytes;
};
struct ZeroJob {
  void* pointer;
  size_t bytes;
};
using Job = std::variant<QuantizeJob, DequantizeJob, ReduceJob, PerturbJob, CompareJob, CopyJob, ZeroJob>;

void runJob(const QuantizeJob& job) { host::quantize(job); }
void runJob(const DequantizeJob& job) { host::dequantize(job); }
void runJob(const ReduceJob& job) { host::reduce(job); }
void runJob(const PerturbJob& job) { halfwire::perturb(job); }
void runJob(const CompareJob& job) { halfwire::compare(job); }
void runJob(const CopyJob& job) { std::memcpy(job.to, job.from, job.bytes); }
void runJob(const ZeroJob& job) { std::memset(job.pointer, 0, job.bytes); }

// Copies of jobs between their enqueue and their run. Lives until its last job has run, which may be after
// the device is gone: every job in flight holds a reference. Thread-safe.
class JobPool : public std::enable_shared_from_this<JobPool> {
 public:
  struct Node {
    Job job;
    std::shared_ptr<JobPool> pool;  // set while in flight
  };

  JobPool() {
    nodes_.reserve(kInitialJobs);
    free_.reserve(kInitialJobs);
    for (size_t i = 0; i < kInitialJobs; ++i)
      free_.push_back(nodes_.emplace_back(std::make_unique<Node>()).get());
  }

  Node* take(const Job& job) {
    Node* node = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      if (free_.empty()) {
        free_.reserve(nodes_.size() + 1);  // so that give() never allocates
        free_.push_back(nodes_.emplace_back(std::make_unique<Node>()).get());
      }
      node = free_.back();
      free_.pop_back();
    }
    node->job = job;
    node->pool = shared_from_this();
    return node;
  }

  void give(Node* node) {
    const std::scoped_lock lock(mutex_);
    free_.push_back(node);
  }

  // The host function of every job.
  static void run(void* argument) {
    auto* node = static_cast<Node*>(argument);
    const Job job = node->job;
    // The node may be taken again, and the pool may end, as soon as it is given back.
    const std::shared_ptr<JobPool> pool = std::move(node->pool);
    requestSlice(kDeviceSlice);
    std::visit([](const auto& j) { runJob(j); }, job);
    pool->give(node);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Node*> free_;
};

// Makes a device current while it lives: events and default streams belong to the current device, which is
// another one where one thread drives several ranks.
class DeviceScope {
 public:
  DeviceScope(const HalfwireHostEngine* engine, int device) : engine_(engine), caller_(device) {
    if (engine_->getDevice(&caller_) != cudaSuccess || caller_ == device) return;
    switched_ = engine_->setDevice(device) == cudaSuccess;
  }
  ~DeviceScope() {
    if (switched_) (void)engine_->setDevice(caller_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const HalfwireHostEngine* engine_;
  int caller_;
  bool switched_ = false;
};

Status noGraphs() { return {StatusCode::kUnavailable, "the host engine has no graphs"}; }

class HostDevice final : public Device {
 public:
  HostDevice(const HalfwireHostEngine* engine, int device, const AllocatorCalls& allocator)
      : engine_(engine), device_(device), allocator_(allocator, device), pool_(std::make_shared<JobPool>()) {}

  Status allocate(size_t bytes, void** out) override {
    *out = nullptr;
    if (allocator_.present()) return allocator_.allocate(bytes, out);
    const DeviceScope scope(engine_, device_);
    const cudaError_t error = engine_->malloc(out, bytes);
    if (error == cudaErrorMemoryAllocation)
      return Status(StatusCode::kOutOfMemory,
                    "the host engine could not allocate " + std::to_string(bytes) + " bytes of scratch");
    return check("cudaMalloc", error);
  }

  void release(void* pointer) override {
    if (!allocator_.release(pointer)) (void)engine_->free(pointer);
  }

  Status quantize(const QuantizeJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status dequantize(const DequantizeJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status reduce(const ReduceJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status perturb(const PerturbJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status compare(const CompareJob& job, StreamHandle stream) override { return enqueue(job, stream); }

  Status copy(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    return bytes == 0 ? Status() : launch(CopyJob{to, from, bytes}, stream);
  }
  Status zero(void* pointer, size_t bytes, StreamHandle stream) override {
    return bytes == 0 ? Status() : launch(ZeroJob{pointer, bytes}, stream);
  }

  Status allocateHost(size_t bytes, void** out) override {
    *out = std::malloc(bytes);
    if (*out != nullptr) return {};
    return Status(StatusCode::kOutOfMemory,
                  "there are no " + std::to_string(bytes) + " bytes of host memory");
  }
  void releaseHost(void* pointer) override { std::free(pointer); }

  Status createTimedEvent(EventHandle* out) override { return makeEvent(cudaEventDefault, out); }

  Status elapsed(EventHandle start, EventHandle end, float* ms, bool* done) override {
    *done = false;
    for (const EventHandle event : {start, end}) {
      const cudaError_t error = engine_->eventQuery(static_cast<cudaEvent_t>(event));
      if (error == cudaErrorNotReady) return {};
      if (Status s = check("cudaEventQuery", error); !s.ok()) return s;
    }
    *done = true;
    return check("cudaEventElapsedTime", engine_->eventElapsedTime(ms, static_cast<cudaEvent_t>(start),
                                                                   static_cast<cudaEvent_t>(end)));
  }

  Status createEvent(EventHandle* out) override { return makeEvent(cudaEventDisableTiming, out); }

  void destroyEvent(EventHandle event) override {
    (void)engine_->eventDestroy(static_cast<cudaEvent_t>(event));
  }

  Status recordEvent(EventHandle event, StreamHandle stream) override {
    const DeviceScope scope(engine_, device_);
    return check("cudaEventRecord",
                 engine_->eventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  }

  Status waitEvent(StreamHandle stream, EventHandle event) override {
    const DeviceScope scope(engine_, device_);
    return check("cudaStreamWaitEvent", engine_->streamWaitEvent(static_cast<cudaStream_t>(stream),
                                                                 static_cast<cudaEvent_t>(event), 0));
  }

  Status synchronizeEvent(EventHandle event) override {
    return check("cudaEventSynchronize", engine_->eventSynchronize(static_cast<cudaEvent_t>(event)));
  }

  Status captureOf(StreamHandle stream, uint64_t* out) override {
    *out = 0;
    const DeviceScope scope(engine_, device_);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const Status status = check("cudaStreamIsCapturing",
                                engine_->streamIsCapturing(static_cast<cudaStream_t>(stream), &capture));
    *out = capture != cudaStreamCaptureStatusNone ? 1 : 0;
    return status;
  }

  Status recordEventOutside(EventHandle, StreamHandle) override { return noGraphs(); }
  Status waitEventOutside(StreamHandle, EventHandle) override { return noGraphs(); }

  Status createStream(StreamHandle* out) override {
    const DeviceScope scope(engine_, device_);
    cudaStream_t stream = nullptr;
    const Status status =
        check("cudaStreamCreateWithFlags", engine_->streamCreate(&stream, cudaStreamNonBlocking));
    *out = stream;
    return status;
  }

  Status finishStream(StreamHandle stream) override {
    const DeviceScope scope(engine_, device_);
    const auto handle = static_cast<cudaStream_t>(stream);
    const Status status = check("cudaStreamSynchronize", engine_->streamSynchronize(handle));
    (void)engine_->streamDestroy(handle);
    return status;
  }

  bool connectsLazily() const override { return false; }
  bool overlapsPasses() const override { return true; }
  uint64_t nvlinkDomain() const override { return 0; }

  const char* codecName() const override { return host::simdTarget(); }

  size_t freeBytes() override { return 0; }

 private:
  static Status check(const char* call, cudaError_t error) {
    if (error == cudaSuccess) return {};
    return Status(StatusCode::kInternal,
                  std::string(call) + " of the host engine failed with error " + std::to_string(error));
  }

  template <class T>
  Status enqueue(const T& job, StreamHandle stream) {
    if (Status status = checkJob(job); !status.ok()) return status;
    return launch(job, stream);
  }

  Status makeEvent(unsigned flags, EventHandle* out) {
    const DeviceScope scope(engine_, device_);
    cudaEvent_t event = nullptr;
    const Status status = check("cudaEventCreateWithFlags", engine_->eventCreate(&event, flags));
    *out = event;
    return status;
  }

  Status launch(const Job& job, StreamHandle stream) {
    const DeviceScope scope(engine_, device_);
    JobPool::Node* node = pool_->take(job);
    const cudaError_t error = engine_->launchHostFunc(static_cast<cudaStream_t>(stream), &JobPool::run, node);
    if (error == cudaSuccess) return {};
    node->pool.reset();
    pool_->give(node);
    return check("cudaLaunchHostFunc", error);
  }

  const HalfwireHostEngine* engine_;
  int device_;
  ProgramAllocator allocator_;
  std::shared_ptr<JobPool> pool_;
};

}  // namespace

Result<std::unique_ptr<Device>> makeHostDevice(const HalfwireHostEngine* engine, int ordinal,
                                               const AllocatorCalls& allocator) {
  if (engine == nullptr)
    return Status(StatusCode::kInvalidArgument, "there is no host engine to make a device of");
  if (engine->version != 1 || engine->bytes < sizeof(HalfwireHostEngine))
    return Status(StatusCode::kUnavailable,
                  "the host engine is of version " + std::to_string(engine->version) +
                      "; this library speaks version 1: use the libraries of one build");
  return std::unique_ptr<Device>(std::make_unique<HostDevice>(engine, ordinal, allocator));
}

}  // namespace halfwire
