#include "hostrt/memory.h"

#include <cstdlib>
#include <new>

namespace halfwire::hostrt {

cudaError_t Memory::allocate(void** out, size_t bytes, cudaMemoryType type, int device) {
  if (out == nullptr) return cudaErrorInvalidValue;
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 512, bytes) != 0) return cudaErrorMemoryAllocation;
  std::lock_guard lock(mutex_);
  blocks_[static_cast<const char*>(pointer)] = {bytes, type, device};
  *out = pointer;
  return cudaSuccess;
}

cudaError_t Memory::release(void* pointer, cudaMemoryType type) {
  if (pointer == nullptr) return cudaSuccess;
  {
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<const char*>(pointer));
    if (found == blocks_.end() || found->second.type != type) return cudaErrorInvalidValue;
    blocks_.erase(found);
  }
  std::free(pointer);
  return cudaSuccess;
}

bool Memory::owns(const void* pointer, cudaMemoryType type) {
  std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<const char*>(pointer));
  return found != blocks_.end() && found->second.type == type;
}

cudaPointerAttributes Memory::attributes(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  std::lock_guard lock(mutex_);
  auto found = blocks_.upper_bound(address);
  if (found != blocks_.begin()) {
    --found;
    if (address < found->first + found->second.bytes) {
      void* p = const_cast<void*>(pointer);
      const bool host = found->second.type == cudaMemoryTypeHost;
      return {found->second.type, found->second.device, p, host ? p : nullptr};
    }
  }
  return {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void*>(pointer)};
}

void Memory::resetLockInChild() { new (&mutex_) std::mutex; }

}  // namespace halfwire::hostrt
