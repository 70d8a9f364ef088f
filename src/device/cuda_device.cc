// Device on the CUDA driver API: one context, its module of embedded kernels, launches on the program's
// streams.
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "device/check_job.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/nvlink.h"
#include "wire/cuda_codec.h"

#ifndef HALFWIRE_CUDA_ARCHS
#define HALFWIRE_CUDA_ARCHS "none"
#endif

#ifdef HALFWIRE_HAVE_KERNELS
extern "C" const unsigned char halfwire_kernels[];
#endif

namespace halfwire {
namespace {

using cuda::CUcontext;
using cuda::Driver;
using cuda::kSuccess;

#ifdef HALFWIRE_HAVE_KERNELS
const void* embeddedKernels() { return halfwire_kernels; }
#else
const void* embeddedKernels() { return nullptr; }
#endif

// Makes `context` current for a scope, at the cost of one query where it is current already.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    if (driver.cuCtxGetCurrent(&current) == kSuccess && current == context) return;
    pushed_ = driver.cuCtxPushCurrent(context) == kSuccess;
  }
  ~ContextScope() {
    CUcontext ours = nullptr;
    if (pushed_) (void)driver_.cuCtxPopCurrent(&ours);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Lets calls that a capture elsewhere in the process would forbid (allocation, module load) through for a
// scope.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    exchanged_ = driver_.cuThreadExchangeStreamCaptureMode(&mode_) == kSuccess;
  }
  ~RelaxedCapture() {
    if (exchanged_) (void)driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = cuda::kCaptureModeRelaxed;
  bool exchanged_ = false;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const Driver& driver, cuda::CUdevice device, CUcontext context, const AllocatorCalls& allocator)
      : driver_(driver), device_(device), context_(context), allocator_(allocator, device) {}

  ~CudaDevice() override {
    if (module_ != nullptr) {
      const ContextScope scope(driver_, context_);
      (void)driver_.cuModuleUnload(module_);
    }
    (void)driver_.cuDevicePrimaryCtxRelease(device_);
  }

  // Loads the module, chooses the path, has every kernel of it loaded by launching it on nothing.
  Status load(bool stochastic) {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    if (Status status = loadModule(); !status.ok()) return status;
    if (Status status = choosePath(); !status.ok()) return status;
    nvlink_domain_ = cuda::nvlinkDomain(driver_, device_);
    cuda::CUstream stream = nullptr;
    Status status =
        driver_.check("cuStreamCreate", driver_.cuStreamCreate(&stream, cuda::kStreamNonBlocking));
    if (!status.ok()) return status;
    for (uint32_t i = 0; i < kCudaKernels && status.ok(); ++i) {
      const CodecPath path = cudaKernelPath(i).value_or(path_);
      if (path != path_ && !(stochastic && path == CodecPath::kStochastic)) continue;
      status = driver_.check(cudaKernelName(i).c_str(),
                             driver_.cuModuleGetFunction(&functions_[i], module_, cudaKernelName(i).c_str()));
      CudaLaunch empty = cudaEmptyLaunch(i);
      if (status.ok()) status = launch(empty, stream);
    }
    const Status finished = driver_.check("cuStreamSynchronize", driver_.cuStreamSynchronize(stream));
    (void)driver_.cuStreamDestroy(stream);
    return status.ok() ? finished : status;
  }

  Status allocate(size_t bytes, void** out) override {
    if (allocator_.present()) return allocator_.allocate(bytes, out);
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    cuda::CUdeviceptr pointer = 0;
    const Status status = driver_.check("cuMemAlloc", driver_.cuMemAlloc(&pointer, bytes));
    *out = status.ok() ? reinterpret_cast<void*>(static_cast<uintptr_t>(pointer)) : nullptr;
    if (status.code() != StatusCode::kOutOfMemory) return status;
    return Status(StatusCode::kOutOfMemory,
                  "cuMemAlloc: the GPU has no " + std::to_string(bytes) + " bytes free");
  }

  void release(void* pointer) override {
    if (allocator_.release(pointer)) return;
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    (void)driver_.cuMemFree(reinterpret_cast<uintptr_t>(pointer));
  }

  Status quantize(const QuantizeJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status dequantize(const DequantizeJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status reduce(const ReduceJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status perturb(const PerturbJob& job, StreamHandle stream) override { return enqueue(job, stream); }
  Status compare(const CompareJob& job, StreamHandle stream) override { return enqueue(job, stream); }

  Status copy(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    if (bytes == 0) return {};
    const ContextScope scope(driver_, context_);
    return driver_.check("cuMemcpyAsync",
                         driver_.cuMemcpyAsync(reinterpret_cast<uintptr_t>(to),
                                               reinterpret_cast<uintptr_t>(from), bytes, asStream(stream)));
  }

  Status zero(void* pointer, size_t bytes, StreamHandle stream) override {
    if (bytes == 0) return {};
    const ContextScope scope(driver_, context_);
    return driver_.check("cuMemsetD8Async", driver_.cuMemsetD8Async(reinterpret_cast<uintptr_t>(pointer), 0,
                                                                    bytes, asStream(stream)));
  }

  Status allocateHost(size_t bytes, void** out) override {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    *out = nullptr;
    return driver_.check("cuMemHostAlloc", driver_.cuMemHostAlloc(out, bytes, 0));
  }

  void releaseHost(void* pointer) override {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    (void)driver_.cuMemFreeHost(pointer);
  }

  Status createTimedEvent(EventHandle* out) override { return makeEvent(cuda::kEventDefault, out); }

  Status elapsed(EventHandle start, EventHandle end, float* ms, bool* done) override {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    *done = false;
    for (const EventHandle event : {start, end}) {
      const cuda::CUresult error = driver_.cuEventQuery(static_cast<cuda::CUevent>(event));
      if (error == cuda::kErrorNotReady) return {};
      if (Status s = driver_.check("cuEventQuery", error); !s.ok()) return s;
    }
    *done = true;
    return driver_.check(
        "cuEventElapsedTime",
        driver_.cuEventElapsedTime(ms, static_cast<cuda::CUevent>(start), static_cast<cuda::CUevent>(end)));
  }

  Status createEvent(EventHandle* out) override { return makeEvent(cuda::kEventDisableTiming, out); }

  void destroyEvent(EventHandle event) override {
    (void)driver_.cuEventDestroy(static_cast<cuda::CUevent>(event));
  }

  Status recordEvent(EventHandle event, StreamHandle stream) override {
    const ContextScope scope(driver_, context_);
    return driver_.check("cuEventRecord",
                         driver_.cuEventRecord(static_cast<cuda::CUevent>(event), asStream(stream)));
  }

  Status waitEvent(StreamHandle stream, EventHandle event) override {
    const ContextScope scope(driver_, context_);
    return driver_.check("cuStreamWaitEvent",
                         driver_.cuStreamWaitEvent(asStream(stream), static_cast<cuda::CUevent>(event), 0));
  }

  Status synchronizeEvent(EventHandle event) override {
    return driver_.check("cuEventSynchronize", driver_.cuEventSynchronize(static_cast<cuda::CUevent>(event)));
  }

  Status captureOf(StreamHandle stream, uint64_t* capture) override {
    const ContextScope scope(driver_, context_);
    int state = cuda::kCaptureStatusNone;
    unsigned long long id = 0;
    const Status status = driver_.check("cuStreamGetCaptureInfo",
                                        driver_.cuStreamGetCaptureInfo(asStream(stream), &state, &id));
    *capture = state == cuda::kCaptureStatusNone ? 0 : std::max<uint64_t>(id, 1);
    return status;
  }

  Status recordEventOutside(EventHandle event, StreamHandle stream) override {
    const ContextScope scope(driver_, context_);
    return driver_.check("cuEventRecordWithFlags",
                         driver_.cuEventRecordWithFlags(static_cast<cuda::CUevent>(event), asStream(stream),
                                                        cuda::kEventRecordExternal));
  }

  Status waitEventOutside(StreamHandle stream, EventHandle event) override {
    const ContextScope scope(driver_, context_);
    return driver_.check("cuStreamWaitEvent",
                         driver_.cuStreamWaitEvent(asStream(stream), static_cast<cuda::CUevent>(event),
                                                   cuda::kEventWaitExternal));
  }

  Status createStream(StreamHandle* out) override {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    cuda::CUstream stream = nullptr;
    const Status status =
        driver_.check("cuStreamCreate", driver_.cuStreamCreate(&stream, cuda::kStreamNonBlocking));
    *out = stream;
    return status;
  }

  Status finishStream(StreamHandle stream) override {
    const ContextScope scope(driver_, context_);
    const RelaxedCapture relaxed(driver_);
    const Status status = driver_.check("cuStreamSynchronize", driver_.cuStreamSynchronize(asStream(stream)));
    (void)driver_.cuStreamDestroy(asStream(stream));
    return status;
  }

  bool connectsLazily() const override { return true; }
  bool overlapsPasses() const override { return false; }
  uint64_t nvlinkDomain() const override { return nvlink_domain_; }

  const char* codecName() const override { return path_ == CodecPath::kHardware ? "hardware" : "software"; }

  size_t freeBytes() override {
    const ContextScope scope(driver_, context_);
    size_t free = 0;
    size_t total = 0;
    return driver_.cuMemGetInfo(&free, &total) == kSuccess ? free : 0;
  }

 private:
  static cuda::CUstream asStream(StreamHandle stream) { return static_cast<cuda::CUstream>(stream); }

  Status makeEvent(unsigned flags, EventHandle* out) {
    const ContextScope scope(driver_, context_);
    cuda::CUevent event = nullptr;
    const Status status = driver_.check("cuEventCreate", driver_.cuEventCreate(&event, flags));
    *out = event;
    return status;
  }

  Status loadModule() {
    const cuda::CUresult error = driver_.cuModuleLoadData(&module_, embeddedKernels());
    if (error == kSuccess) return {};
    module_ = nullptr;
    const Status status = driver_.check("cuModuleLoadData", error);
    return Status(status.code() == StatusCode::kOutOfMemory ? status.code() : StatusCode::kUnavailable,
                  "loading Halfwire's kernels failed: " + status.message() +
                      "; they were built for " HALFWIRE_CUDA_ARCHS
                      ": build with HALFWIRE_CUDA_ARCHS for this GPU, and with a CUDA toolkit no newer than "
                      "the driver");
  }

  // FP8 instructions where the GPU has them and the loaded image uses them, or what HALFWIRE_CODEC_PATH says.
  Status choosePath() {
    int major = 0;
    int minor = 0;
    for (const auto& [attribute, value] : {std::pair(cuda::kComputeCapabilityMajor, &major),
                                           std::pair(cuda::kComputeCapabilityMinor, &minor)}) {
      if (Status s =
              driver_.check("cuDeviceGetAttribute", driver_.cuDeviceGetAttribute(value, attribute, device_));
          !s.ok())
        return s;
    }
    // PTX for an older architecture, compiled by the driver for this GPU, holds the software path alone.
    bool in_image = false;
    for (uint32_t i = 0; i < kCudaKernels && !in_image; ++i) {
      cuda::CUfunction function = nullptr;
      if (cudaKernelPath(i) != CodecPath::kHardware) continue;
      in_image = driver_.cuModuleGetFunction(&function, module_, cudaKernelName(i).c_str()) == kSuccess;
      break;
    }
    const bool hardware = in_image && (major > 8 || (major == 8 && minor >= 9));
    path_ = hardware ? CodecPath::kHardware : CodecPath::kSoftware;
    const char* wanted = std::getenv("HALFWIRE_CODEC_PATH");
    if (wanted == nullptr || *wanted == '\0') return {};
    if (std::strcmp(wanted, "software") == 0) {
      path_ = CodecPath::kSoftware;
      return {};
    }
    if (std::strcmp(wanted, "hardware") != 0)
      return Status(StatusCode::kInvalidArgument,
                    std::string("HALFWIRE_CODEC_PATH is '") + wanted + "'; it must be hardware or software");
    if (hardware) return {};
    return Status(StatusCode::kUnavailable,
                  "HALFWIRE_CODEC_PATH=hardware, but this GPU of compute capability " +
                      std::to_string(major) + "." + std::to_string(minor) +
                      " has no FP8 instructions or no kernels of its own in this build (" HALFWIRE_CUDA_ARCHS
                      ")");
  }

  Status launch(CudaLaunch& launch, cuda::CUstream stream) {
    void* params[] = {launch.argument()};
    return driver_.check(cudaKernelName(launch.kernel).c_str(),
                         driver_.cuLaunchKernel(functions_[launch.kernel], launch.grid_x, launch.grid_y, 1,
                                                launch.threads, 1, 1, 0, stream, params, nullptr));
  }

  template <class Job>
  Status enqueue(const Job& job, StreamHandle stream) {
    if (Status status = checkJob(job); !status.ok()) return status;
    const ContextScope scope(driver_, context_);
    CudaLaunch next;
    for (uint32_t part = 0; cudaLaunch(job, path_, part, &next); ++part) {
      if (Status status = launch(next, asStream(stream)); !status.ok()) return status;
    }
    return {};
  }

  const Driver driver_;
  const cuda::CUdevice device_;
  const CUcontext context_;
  ProgramAllocator allocator_;
  cuda::CUmodule module_ = nullptr;
  uint64_t nvlink_domain_ = 0;
  CodecPath path_ = CodecPath::kSoftware;
  std::array<cuda::CUfunction, kCudaKernels> functions_{};
};

}  // namespace

Result<std::unique_ptr<Device>> makeCudaDevice(int ordinal, const AllocatorCalls& allocator,
                                               bool stochastic) {
  if (embeddedKernels() == nullptr)
    return Status(StatusCode::kUnavailable,
                  "this build has no CUDA kernels: nvcc was not found when it was configured; set CUDA_HOME "
                  "and build again");
  Result<Driver> driver = cuda::findDriver();
  if (!driver.ok()) return driver.status();
  cuda::CUdevice number = 0;
  CUcontext context = nullptr;
  const Driver& d = driver.value();
  if (Status s = d.check("cuDeviceGet", d.cuDeviceGet(&number, ordinal)); !s.ok()) return s;
  if (Status s = d.check("cuDevicePrimaryCtxRetain", d.cuDevicePrimaryCtxRetain(&context, number)); !s.ok())
    return s;
  auto device = std::make_unique<CudaDevice>(d, number, context, allocator);
  if (Status s = device->load(stochastic); !s.ok()) return s;
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace halfwire
