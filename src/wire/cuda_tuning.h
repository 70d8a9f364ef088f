// The shapes of the kernels: threads of a thread block, elements of a thread, threads that must fit on a
// multiprocessor at once (which bounds registers). Chosen by measurement, see docs/kernels.md.
#pragma once

#include <cstdint>

#include "wire/cuda_params.h"
#include "wire/format.h"

namespace halfwire::cuda {

inline constexpr uint32_t kQuantizeThreads = 256;
inline constexpr uint32_t kQuantizeResident = 1280;
inline constexpr LoadHint kQuantizeHint = LoadHint::kStreaming;
constexpr uint32_t quantizeRepeat(DataType) { return 1; }

inline constexpr uint32_t kDequantizeThreads = 256;
inline constexpr uint32_t kDequantizeResident = 1280;
constexpr uint32_t dequantizeRepeat(DataType) { return 1; }

inline constexpr uint32_t kReduceThreads = 128;
inline constexpr uint32_t kReduceResident = 1024;
inline constexpr uint32_t kReduceDepth = 4;
inline constexpr LoadHint kReduceHint = LoadHint::kStreaming;

}  // namespace halfwire::cuda
