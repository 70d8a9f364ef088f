// The CUDA kernels of the wire under names that cuda_codec.cc builds:
//   halfwire_quantize_<format>_<type>_<path>_<blocks per thread>
//   halfwire_dequantize_<format>_<type>_<path>
//   halfwire_reduce_<format>_<packet or type>_<path>
//   halfwire_perturb_<bits of an element>
//   halfwire_compare_<type>
// The hardware path exists in images for compute capability 8.9 and later; where the two paths are one, it is
// "any". What rounds stochastically is a path of its own, "stochastic".
#include "wire/cuda_kernels.h"
#include "wire/cuda_tuning.h"

namespace cuda = halfwire::cuda;
using halfwire::CodecPath;
using halfwire::DataType;
using halfwire::ElementFormat;

#define HALFWIRE_QUANTIZE(format, F, type, T, path, P, blocks)                                   \
  extern "C" __global__ void __launch_bounds__(cuda::kQuantizeThreads,                           \
                                               cuda::residentBlocks(cuda::quantizeResident(DataType::T, blocks), cuda::kQuantizeThreads)) \
      halfwire_quantize_##format##_##type##_##path##_##blocks(                                   \
          const __grid_constant__ halfwire::QuantizeParams p) {                                  \
    cuda::Quantize<DataType::T, ElementFormat::F, CodecPath::P, blocks, cuda::kQuantizeThreads,  \
                   cuda::quantizeRepeat(DataType::T, blocks), cuda::kQuantizeHint>::run(p);              \
  }
#define HALFWIRE_DEQUANTIZE(format, F, type, T, path, P)                                                     \
  extern "C" __global__ void __launch_bounds__(cuda::kDequantizeThreads,                                     \
                                               cuda::residentBlocks(cuda::kDequantizeResident, cuda::kDequantizeThreads))         \
      halfwire_dequantize_##format##_##type##_##path(const __grid_constant__ halfwire::DequantizeParams p) { \
    cuda::Dequantize<DataType::T, ElementFormat::F, CodecPath::P, cuda::kDequantizeThreads,                  \
                     cuda::dequantizeRepeat(DataType::T)>::run(p);                                           \
  }
#define HALFWIRE_REDUCE(format, F, target, call, path, P)                                              \
  extern "C" __global__ void __launch_bounds__(cuda::kReduceThreads,                                   \
                                               cuda::residentBlocks(cuda::kReduceResident, cuda::kReduceThreads))           \
      halfwire_reduce_##format##_##target##_##path(const __grid_constant__ halfwire::ReduceParams p) { \
    cuda::Reduce<ElementFormat::F, CodecPath::P, cuda::kReduceThreads, cuda::kReduceDepth,             \
                 cuda::kReduceHint>::call(p);                                                          \
  }

#define HALFWIRE_QUANTIZE_TYPES(format, F, path, P)     \
  HALFWIRE_QUANTIZE(format, F, bf16, kBf16, path, P, 1) \
  HALFWIRE_QUANTIZE(format, F, bf16, kBf16, path, P, 2) \
  HALFWIRE_QUANTIZE(format, F, fp16, kFp16, path, P, 1) \
  HALFWIRE_QUANTIZE(format, F, fp16, kFp16, path, P, 2) \
  HALFWIRE_QUANTIZE(format, F, fp32, kFp32, path, P, 1) \
  HALFWIRE_QUANTIZE(format, F, fp32, kFp32, path, P, 2) \
  HALFWIRE_QUANTIZE(format, F, fp32, kFp32, path, P, 4)
#define HALFWIRE_DEQUANTIZE_TYPES(format, F, path, P)  \
  HALFWIRE_DEQUANTIZE(format, F, bf16, kBf16, path, P) \
  HALFWIRE_DEQUANTIZE(format, F, fp16, kFp16, path, P) \
  HALFWIRE_DEQUANTIZE(format, F, fp32, kFp32, path, P)
#define HALFWIRE_REDUCE_ELEMENTS(format, F, path, P)                              \
  HALFWIRE_REDUCE(format, F, bf16, template toElements<DataType::kBf16>, path, P) \
  HALFWIRE_REDUCE(format, F, fp16, template toElements<DataType::kFp16>, path, P) \
  HALFWIRE_REDUCE(format, F, fp32, template toElements<DataType::kFp32>, path, P)

#if __CUDA_ARCH__ >= 890
HALFWIRE_QUANTIZE_TYPES(e4m3, kE4M3, hardware, kHardware)
HALFWIRE_QUANTIZE_TYPES(e5m2, kE5M2, hardware, kHardware)
HALFWIRE_DEQUANTIZE_TYPES(e4m3, kE4M3, hardware, kHardware)
HALFWIRE_REDUCE_ELEMENTS(e4m3, kE4M3, hardware, kHardware)
HALFWIRE_REDUCE(e4m3, kE4M3, packet, toPacket, hardware, kHardware)
HALFWIRE_REDUCE(e5m2, kE5M2, packet, toPacket, hardware, kHardware)
#endif
HALFWIRE_QUANTIZE_TYPES(e4m3, kE4M3, software, kSoftware)
HALFWIRE_QUANTIZE_TYPES(e5m2, kE5M2, software, kSoftware)
HALFWIRE_QUANTIZE_TYPES(int8, kInt8, any, kSoftware)
HALFWIRE_QUANTIZE_TYPES(e3m4, kE3M4, any, kSoftware)
HALFWIRE_DEQUANTIZE_TYPES(e4m3, kE4M3, software, kSoftware)
HALFWIRE_DEQUANTIZE_TYPES(e5m2, kE5M2, any, kSoftware)
HALFWIRE_DEQUANTIZE_TYPES(int8, kInt8, any, kSoftware)
HALFWIRE_DEQUANTIZE_TYPES(e3m4, kE3M4, any, kSoftware)
HALFWIRE_REDUCE_ELEMENTS(e4m3, kE4M3, software, kSoftware)
HALFWIRE_REDUCE_ELEMENTS(e5m2, kE5M2, any, kSoftware)
HALFWIRE_REDUCE_ELEMENTS(int8, kInt8, any, kSoftware)
HALFWIRE_REDUCE_ELEMENTS(e3m4, kE3M4, any, kSoftware)
HALFWIRE_REDUCE(e4m3, kE4M3, packet, toPacket, software, kSoftware)
HALFWIRE_REDUCE(e5m2, kE5M2, packet, toPacket, software, kSoftware)
HALFWIRE_REDUCE(int8, kInt8, packet, toPacket, any, kSoftware)
HALFWIRE_REDUCE(e3m4, kE3M4, packet, toPacket, any, kSoftware)
HALFWIRE_QUANTIZE_TYPES(e4m3, kE4M3, stochastic, kStochastic)
HALFWIRE_QUANTIZE_TYPES(e5m2, kE5M2, stochastic, kStochastic)
HALFWIRE_QUANTIZE_TYPES(int8, kInt8, stochastic, kStochastic)
HALFWIRE_QUANTIZE_TYPES(e3m4, kE3M4, stochastic, kStochastic)
HALFWIRE_REDUCE(e4m3, kE4M3, packet, toPacket, stochastic, kStochastic)
HALFWIRE_REDUCE(e5m2, kE5M2, packet, toPacket, stochastic, kStochastic)
HALFWIRE_REDUCE(int8, kInt8, packet, toPacket, stochastic, kStochastic)
HALFWIRE_REDUCE(e3m4, kE3M4, packet, toPacket, stochastic, kStochastic)

template <class Bits>
__device__ __forceinline__ void perturbTile(const halfwire::PerturbParams& p) {
  auto* data = static_cast<Bits*>(p.data);
  uint64_t i = uint64_t{blockIdx.x} * cuda::kPerturbThreads * cuda::kPerturbRepeat + threadIdx.x;
#pragma unroll 4
  for (uint32_t k = 0; k < cuda::kPerturbRepeat && i < p.elements; ++k, i += cuda::kPerturbThreads)
    data[i] = static_cast<Bits>(halfwire::perturbed(data[i], p.step, p.seed, i));
}

extern "C" __global__ void __launch_bounds__(cuda::kPerturbThreads)
    halfwire_perturb_16(const __grid_constant__ halfwire::PerturbParams p) {
  perturbTile<uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(cuda::kPerturbThreads)
    halfwire_perturb_32(const __grid_constant__ halfwire::PerturbParams p) {
  perturbTile<uint32_t>(p);
}

template <DataType T>
__device__ __forceinline__ double elementAt(const void* base, uint64_t i) {
  if constexpr (T == DataType::kFp32) {
    return static_cast<const float*>(base)[i];
  } else if constexpr (T == DataType::kBf16) {
    return __uint_as_float(uint32_t{static_cast<const uint16_t*>(base)[i]} << 16);
  } else {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<const uint16_t*>(base)[i]));
    return value;
  }
}

template <class Number>
__device__ __forceinline__ Number warpSum(Number value) {
#pragma unroll
  for (uint32_t offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <DataType T>
__device__ __forceinline__ void compareBlocks(const halfwire::CompareParams& p) {
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t warps = uint64_t{gridDim.x} * (cuda::kCompareThreads / 32);
  double exact_squares = 0, other_squares = 0, error_squares = 0, product = 0, worst = 0;
  unsigned long long elements = 0, flushed = 0, not_finite = 0;
  if (p.elements == 0) return;
  for (uint64_t block = (uint64_t{blockIdx.x} * cuda::kCompareThreads + threadIdx.x) / 32;
       block * halfwire::kCompareBlock < p.elements; block += warps) {
    double block_exact = 0, block_error = 0;
#pragma unroll
    for (uint32_t k = 0; k < halfwire::kCompareBlock / 32; ++k) {
      const uint64_t i = block * halfwire::kCompareBlock + k * 32 + lane;
      if (i >= p.elements) continue;
      const double x = elementAt<T>(p.exact, i), y = elementAt<T>(p.other, i);
      if (!isfinite(x) || !isfinite(y)) {
        ++not_finite;
        continue;
      }
      ++elements;
      if (y == 0 && x != 0) ++flushed;
      block_exact += x * x;
      block_error += (y - x) * (y - x);
      other_squares += y * y;
      product += x * y;
    }
    block_exact = warpSum(block_exact);
    block_error = warpSum(block_error);
    if (lane != 0) continue;
    exact_squares += block_exact;
    error_squares += block_error;
    if (block_exact > 0) worst = fmax(worst, sqrt(block_error / block_exact));
  }
  // The block's sums are in lane 0 alone, the others in every lane.
  other_squares = warpSum(other_squares);
  product = warpSum(product);
  const unsigned long long all_elements = warpSum(elements), all_flushed = warpSum(flushed),
                           all_not_finite = warpSum(not_finite);
  if (lane != 0) return;
  atomicAdd(&p.sums->exact_squares, exact_squares);
  atomicAdd(&p.sums->other_squares, other_squares);
  atomicAdd(&p.sums->error_squares, error_squares);
  atomicAdd(&p.sums->product, product);
  atomicAdd(reinterpret_cast<unsigned long long*>(&p.sums->elements), all_elements);
  atomicAdd(reinterpret_cast<unsigned long long*>(&p.sums->flushed), all_flushed);
  atomicAdd(reinterpret_cast<unsigned long long*>(&p.sums->not_finite), all_not_finite);
  // Doubles that are not negative compare as their bits do.
  atomicMax(reinterpret_cast<unsigned long long*>(&p.sums->worst_block),
            static_cast<unsigned long long>(__double_as_longlong(worst)));
}

#define HALFWIRE_COMPARE(type, T)                                                              \
  extern "C" __global__ void __launch_bounds__(cuda::kCompareThreads)                          \
      halfwire_compare_##type(const __grid_constant__ halfwire::CompareParams p) {             \
    compareBlocks<DataType::T>(p);                                                             \
  }
HALFWIRE_COMPARE(bf16, kBf16)
HALFWIRE_COMPARE(fp16, kFp16)
HALFWIRE_COMPARE(fp32, kFp32)
