#include "device/allocator.h"

#include <cstdint>
#include <string>

namespace halfwire {

Status ProgramAllocator::allocate(size_t bytes, void** out) {
  *out = nullptr;
  void* pointer = calls_.allocate(bytes, device_, calls_.context);
  if (pointer == nullptr) {
    return {StatusCode::kOutOfMemory,
            "the program's allocator gave no " + std::to_string(bytes) + " bytes of device memory"};
  }
  if (reinterpret_cast<uintptr_t>(pointer) % 256 != 0) {
    calls_.release(pointer, bytes, device_, calls_.context);
    return {StatusCode::kInvalidArgument,
            "the program's allocator gave memory that is not aligned to 256 bytes"};
  }
  std::lock_guard lock(mutex_);
  lent_[pointer] = bytes;
  *out = pointer;
  return {};
}

bool ProgramAllocator::release(void* pointer) {
  size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = lent_.find(pointer);
    if (found == lent_.end()) return false;
    bytes = found->second;
    lent_.erase(found);
  }
  calls_.release(pointer, bytes, device_, calls_.context);
  return true;
}

}  // namespace halfwire
