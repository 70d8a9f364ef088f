// What the host engine (libhalfwire-hostccl.so) tells the interposer. The engine exports one sentinel function;
// a real NCCL does not have it, so its presence in the library that owns a communicator decides, and nothing
// else does, whether that communicator's memory and streams are host objects.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/cuda_runtime.h"

extern "C" {

// Function pointers into libhalfwire-hostrt.so; semantics are those of the CUDA runtime functions of the same name.
struct HalfwireHostEngine {
  uint32_t version;  // 1
  uint32_t bytes;    // sizeof(HalfwireHostEngine)
  cudaError_t (*malloc)(void** pointer, size_t bytes);
  cudaError_t (*free)(void* pointer);
  cudaError_t (*launchHostFunc)(cudaStream_t stream, cudaHostFn_t function, void* argument);
  cudaError_t (*eventCreate)(cudaEvent_t* event, unsigned flags);
  cudaError_t (*eventDestroy)(cudaEvent_t event);
  cudaError_t (*eventRecord)(cudaEvent_t event, cudaStream_t stream);
  cudaError_t (*streamWaitEvent)(cudaStream_t stream, cudaEvent_t event, unsigned flags);
  cudaError_t (*streamIsCapturing)(cudaStream_t stream, cudaStreamCaptureStatus* status);
  cudaError_t (*getDevice)(int* device);
  cudaError_t (*setDevice)(int device);
  cudaError_t (*eventSynchronize)(cudaEvent_t event);
  cudaError_t (*streamCreate)(cudaStream_t* stream, unsigned flags);
  cudaError_t (*streamSynchronize)(cudaStream_t stream);
  cudaError_t (*streamDestroy)(cudaStream_t stream);
  cudaError_t (*eventQuery)(cudaEvent_t event);
  cudaError_t (*eventElapsedTime)(float* ms, cudaEvent_t start, cudaEvent_t end);
};

#define HALFWIRE_HOST_ENGINE_SYMBOL "halfwire_host_engine_v1"
typedef const HalfwireHostEngine* (*HalfwireHostEngineFunction)(void);

// Exported by libhalfwire-hostccl.so.
__attribute__((visibility("default"))) const HalfwireHostEngine* halfwire_host_engine_v1(void);

// Payload bytes this process has handed to its peers' links since it started, all communicators together
// (bytes moved between ranks of one process included). Thread-safe.
__attribute__((visibility("default"))) uint64_t halfwire_host_egress_bytes(void);
}
