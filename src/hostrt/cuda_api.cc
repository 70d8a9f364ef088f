// The CUDA runtime's names. Each is a thin wrapper that finds the process's runtime, keeps the thread's last
// error and lets no exception out.
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "hostrt/hostrt.h"
#include "hostrt/process.h"

namespace {

using halfwire::hostrt::currentDevice;
using halfwire::hostrt::Process;

cudaError_t& lastError() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess) lastError() = error;
  return error;
}

// Runs `body` on the process's runtime.
template <class Body>
cudaError_t call(Body body, bool allocating = false) {
  try {
    cudaError_t error = cudaSuccess;
    Process* process = halfwire::hostrt::process(&error, allocating);
    return keep(process == nullptr ? error : body(*process));
  } catch (const std::bad_alloc&) {
    return keep(cudaErrorMemoryAllocation);
  } catch (...) {
    return keep(cudaErrorUnknown);
  }
}

namespace impl {

cudaError_t allocate(void** pointer, size_t bytes, cudaMemoryType type) {
  return call([&](Process& p) { return p.memory.allocate(pointer, bytes, type, currentDevice()); }, true);
}

cudaError_t release(void* pointer, cudaMemoryType type) {
  return call([&](Process& p) {
    if (pointer == nullptr) return cudaSuccess;
    if (!p.memory.owns(pointer, type)) return cudaErrorInvalidValue;
    // CUDA's free waits for the device, so that no running work loses its memory.
    p.runtime.synchronizeDevice(p.memory.attributes(pointer).device);
    return p.memory.release(pointer, type);
  });
}

cudaError_t malloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, cudaMemoryTypeDevice); }
cudaError_t free(void* pointer) { return release(pointer, cudaMemoryTypeDevice); }

cudaError_t launchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return call([&](Process& p) {
    if (function == nullptr) return cudaErrorInvalidValue;
    return p.runtime.enqueue(stream, [function, argument] { function(argument); });
  });
}

cudaError_t eventCreate(cudaEvent_t* event, unsigned flags) {
  return call([&](Process& p) { return p.runtime.createEvent(currentDevice(), flags, event); });
}
cudaError_t eventDestroy(cudaEvent_t event) {
  return call([&](Process& p) { return p.runtime.destroyEvent(event); });
}
cudaError_t eventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call([&](Process& p) { return p.runtime.recordEvent(event, stream); });
}
cudaError_t streamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call(
      [&](Process& p) { return flags > 1 ? cudaErrorInvalidValue : p.runtime.waitEvent(stream, event); });
}

cudaError_t eventSynchronize(cudaEvent_t event) {
  return call([&](Process& p) { return p.runtime.synchronizeEvent(event); });
}

cudaError_t eventQuery(cudaEvent_t event) {
  return call([&](Process& p) { return p.runtime.queryEvent(event); });
}
cudaError_t eventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return call([&](Process& p) { return p.runtime.elapsed(ms, start, end); });
}
cudaError_t streamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call([&](Process& p) {
    if (status == nullptr) return cudaErrorInvalidValue;
    *status = cudaStreamCaptureStatusNone;
    return p.runtime.checkStream(stream);
  });
}

cudaError_t getDevice(int* device) {
  return call([&](Process&) {
    if (device == nullptr) return cudaErrorInvalidValue;
    *device = currentDevice();
    return cudaSuccess;
  });
}
cudaError_t setDevice(int device) {
  return call([&](Process& p) {
    if (device < 0 || device >= p.runtime.deviceCount()) return cudaErrorInvalidDevice;
    currentDevice() = device;
    return cudaSuccess;
  });
}

// Pageable memory follows CUDA's rules: a source is staged before the call returns, a destination is complete
// when it returns.
cudaError_t copyAsync(Process& p, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                      cudaStream_t stream) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidValue;
  if (bytes == 0) return p.runtime.checkStream(stream);
  if (to == nullptr || from == nullptr) return cudaErrorInvalidValue;
  const bool from_pageable = p.memory.attributes(from).type == cudaMemoryTypeUnregistered;
  const bool to_pageable = p.memory.attributes(to).type == cudaMemoryTypeUnregistered;
  if (from_pageable && !to_pageable) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    return p.runtime.enqueue(stream, [to, staged] { std::memcpy(to, staged->data(), staged->size()); });
  }
  const cudaError_t error = p.runtime.enqueue(stream, [=] { std::memmove(to, from, bytes); });
  if (error != cudaSuccess || !to_pageable) return error;
  return p.runtime.synchronizeStream(stream);
}

cudaError_t setAsync(Process& p, void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return p.runtime.checkStream(stream);
  if (to == nullptr) return cudaErrorInvalidValue;
  return p.runtime.enqueue(stream, [=] { std::memset(to, value, bytes); });
}

cudaError_t createStream(cudaStream_t* stream, unsigned flags) {
  return call([&](Process& p) { return p.runtime.createStream(currentDevice(), flags, stream); });
}
cudaError_t streamSynchronize(cudaStream_t stream) {
  return call([&](Process& p) { return p.runtime.synchronizeStream(stream); });
}
cudaError_t streamDestroy(cudaStream_t stream) {
  return call([&](Process& p) { return p.runtime.destroyStream(stream); });
}

}  // namespace impl

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError",
     "initialization error: the host runtime cannot be used in a child forked after a stream was used; fork "
     "earlier"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice",
     "invalid device ordinal: HALFWIRE_HOST_DEVICES says how many there are"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted",
     "operation not permitted: a host function on a stream must not call CUDA"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return impl::malloc(pointer, bytes); }
cudaError_t cudaFree(void* pointer) { return impl::free(pointer); }

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return call(
      [&](Process& p) {
        if (const cudaError_t error = p.runtime.checkStream(stream); error != cudaSuccess) return error;
        return p.memory.allocate(pointer, bytes, cudaMemoryTypeDevice, currentDevice());
      },
      true);
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return call([&](Process& p) {
    if (pointer == nullptr) return p.runtime.checkStream(stream);
    if (!p.memory.owns(pointer, cudaMemoryTypeDevice)) return cudaErrorInvalidValue;
    return p.runtime.enqueue(stream, [&p, pointer] { p.memory.release(pointer, cudaMemoryTypeDevice); });
  });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return impl::allocate(pointer, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return impl::allocate(pointer, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* pointer) { return impl::release(pointer, cudaMemoryTypeHost); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return call([&](Process& p) {
    if (const cudaError_t error = impl::copyAsync(p, to, from, bytes, kind, nullptr); error != cudaSuccess)
      return error;
    // As in CUDA, only copies between device buffers return early.
    const bool device_only = p.memory.attributes(to).type == cudaMemoryTypeDevice &&
                             p.memory.attributes(from).type == cudaMemoryTypeDevice;
    return device_only ? cudaSuccess : p.runtime.synchronizeStream(nullptr);
  });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call([&](Process& p) { return impl::copyAsync(p, to, from, bytes, kind, stream); });
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return call([&](Process& p) {
    const cudaError_t error = impl::setAsync(p, to, value, bytes, nullptr);
    if (error != cudaSuccess || p.memory.attributes(to).type == cudaMemoryTypeDevice) return error;
    return p.runtime.synchronizeStream(nullptr);
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call([&](Process& p) { return impl::setAsync(p, to, value, bytes, stream); });
}

cudaError_t cudaGetDevice(int* device) { return impl::getDevice(device); }
cudaError_t cudaSetDevice(int device) { return impl::setDevice(device); }
cudaError_t cudaGetDeviceCount(int* count) {
  return call([&](Process& p) {
    if (count == nullptr) return cudaErrorInvalidValue;
    *count = p.runtime.deviceCount();
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceSynchronize(void) {
  return call([&](Process& p) { return p.runtime.synchronizeDevice(currentDevice()); });
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = lastError();
  lastError() = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return lastError(); }

const char* cudaGetErrorString(cudaError_t error) {
  if (const char* why = halfwire::hostrt::refusal(error)) return why;
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.text;
  }
  return "unrecognized error code";
}
const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.name;
  }
  return "unrecognized error code";
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return impl::createStream(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return impl::createStream(stream, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return impl::createStream(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return impl::streamDestroy(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return impl::streamSynchronize(stream); }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call([&](Process& p) { return p.runtime.queryStream(stream); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return impl::streamWaitEvent(stream, event, flags);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return impl::streamIsCapturing(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  if (id != nullptr) *id = 0;
  return impl::streamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  return call([&](Process&) {
    if (mode == nullptr || *mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    std::swap(*mode, current);
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return impl::eventCreate(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return impl::eventCreate(event, flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return impl::eventDestroy(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return impl::eventRecord(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return flags > 1 ? keep(cudaErrorInvalidValue) : impl::eventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return impl::eventQuery(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return impl::eventSynchronize(event); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return impl::eventElapsedTime(ms, start, end);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return impl::launchHostFunc(stream, function, argument);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call([&](Process& p) {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    *attributes = p.memory.attributes(pointer);
    return cudaSuccess;
  });
}

const HalfwireHostEngine* halfwire_hostrt_engine(void) {
  static constexpr HalfwireHostEngine kEngine = {
      .version = 1,
      .bytes = sizeof(HalfwireHostEngine),
      .malloc = impl::malloc,
      .free = impl::free,
      .launchHostFunc = impl::launchHostFunc,
      .eventCreate = impl::eventCreate,
      .eventDestroy = impl::eventDestroy,
      .eventRecord = impl::eventRecord,
      .streamWaitEvent = impl::streamWaitEvent,
      .streamIsCapturing = impl::streamIsCapturing,
      .getDevice = impl::getDevice,
      .setDevice = impl::setDevice,
      .eventSynchronize = impl::eventSynchronize,
      .streamCreate = impl::createStream,
      .streamSynchronize = impl::streamSynchronize,
      .streamDestroy = impl::streamDestroy,
      .eventQuery = impl::eventQuery,
      .eventElapsedTime = impl::eventElapsedTime,
  };
  return &kEngine;
}

void halfwire_hostrt_set_rank(int rank) {
  cudaError_t error = cudaSuccess;
  if (Process* p = halfwire::hostrt::process(&error)) p->runtime.setRank(rank);
}

}  // extern "C"
