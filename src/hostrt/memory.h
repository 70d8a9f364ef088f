// The allocations that stand for device memory and pinned host memory.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "abi/cuda_runtime.h"

namespace halfwire::hostrt {

// Thread-safe.
class Memory {
 public:
  // Memory of `type` (device or host), aligned to 512 bytes. `bytes` 0 gives a null pointer, as in CUDA.
  cudaError_t allocate(void** out, size_t bytes, cudaMemoryType type, int device);
  // Frees what allocate gave with the same type; null is allowed.
  cudaError_t release(void* pointer, cudaMemoryType type);
  // Whether `pointer` could be released now.
  bool owns(const void* pointer, cudaMemoryType type);
  // What kind of memory `pointer` points into; interior pointers count.
  cudaPointerAttributes attributes(const void* pointer);

  void resetLockInChild();

 private:
  struct Block {
    size_t bytes = 0;
    cudaMemoryType type = cudaMemoryTypeUnregistered;
    int device = 0;
  };
  std::mutex mutex_;
  std::map<const char*, Block> blocks_;
};

}  // namespace halfwire::hostrt
