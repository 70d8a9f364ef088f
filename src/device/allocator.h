// Device memory from the program's own allocator, where it lends one: so that the scratch shows in its
// accounting.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "base/status.h"

namespace halfwire {

// As halfwire_set_allocator takes them; none where `allocate` is null.
struct AllocatorCalls {
  void* (*allocate)(size_t bytes, int device, void* context) = nullptr;
  void (*release)(void* pointer, size_t bytes, int device, void* context) = nullptr;
  void* context = nullptr;
};

// The program's allocator for one device. Thread-safe; calls the program without holding a lock.
class ProgramAllocator {
 public:
  ProgramAllocator(const AllocatorCalls& calls, int device) : calls_(calls), device_(device) {}

  // Whether the program lends one.
  bool present() const { return calls_.allocate != nullptr; }

  // kOutOfMemory if the program gives none; an error, and the memory given back, if it is not aligned to 256
  // bytes.
  Status allocate(size_t bytes, void** out);

  // Gives back what allocate() gave; false if `pointer` is not that.
  bool release(void* pointer);

 private:
  AllocatorCalls calls_;
  int device_ = 0;
  std::mutex mutex_;
  std::map<void*, size_t> lent_;
};

}  // namespace halfwire
