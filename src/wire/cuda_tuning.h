// The shapes of the kernels: threads of a thread block, elements of a thread, threads that must fit on a
// multiprocessor at once (which bounds registers). Chosen by measurement, see docs/kernels.md.
#pragma once

#include <cstdint>

#include "wire/cuda_params.h"
#include "wire/format.h"

namespace halfwire::cuda {

// Thread blocks per multiprocessor that the compiler must leave registers for, so that `resident` threads
// fit, or as many as the architecture can hold.
constexpr uint32_t residentBlocks(uint32_t resident, uint32_t threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr uint32_t kMost = 1024;
#else
  constexpr uint32_t kMost = 1536;
#endif
  return (resident < kMost ? resident : kMost) / threads;
}

inline constexpr uint32_t kQuantizeThreads = 256;
constexpr uint32_t quantizeRepeat(DataType type, uint32_t blocks) {
  return type != DataType::kFp32 && blocks == 1 ? 2 : 1;
}
constexpr uint32_t quantizeResident(DataType type, uint32_t blocks) {
  return quantizeRepeat(type, blocks) == 2 || blocks == 4 ? 1024 : 1280;
}
inline constexpr LoadHint kQuantizeHint = LoadHint::kDefault;

inline constexpr uint32_t kDequantizeThreads = 256;
inline constexpr uint32_t kDequantizeResident = 1280;
constexpr uint32_t dequantizeRepeat(DataType) { return 1; }

inline constexpr uint32_t kPerturbThreads = 256;
inline constexpr uint32_t kPerturbRepeat = 16;  // elements of a thread

inline constexpr uint32_t kCompareThreads = 256;
inline constexpr uint32_t kCompareGrid = 1024;  // at most: every thread block ends with a few atomic additions

inline constexpr uint32_t kReduceThreads = 128;
inline constexpr uint32_t kReduceResident = 1024;
inline constexpr uint32_t kReduceDepth = 4;
inline constexpr LoadHint kReduceHint = LoadHint::kStreaming;

}  // namespace halfwire::cuda
