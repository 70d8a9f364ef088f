// The kernels of the default format in every shape of variants.h.
#include "wire/cuda_check/variants.h"

#include "wire/cuda_kernels.h"

namespace cuda = halfwire::cuda;
using halfwire::CodecPath;
using halfwire::DataType;
using halfwire::ElementFormat;
using halfwire::LoadHint;

#define HALFWIRE_QUANTIZE_VARIANT(type, T, path, P, threads, repeat, hint, resident)                          \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)                                   \
      quantize_##type##_##path##_##threads##_##repeat##_##hint##_##resident(                                  \
          const __grid_constant__ halfwire::QuantizeParams p) {                                               \
    cuda::Quantize<DataType::T, ElementFormat::kE4M3, CodecPath::P, 1, threads, repeat,                       \
                   static_cast<LoadHint>(hint)>::run(p);                                                      \
  }
#define HALFWIRE_DEQUANTIZE_VARIANT(type, T, path, P, threads, repeat, hint, resident)                        \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)                                   \
      dequantize_##type##_##path##_##threads##_##repeat##_##hint##_##resident(                                \
          const __grid_constant__ halfwire::DequantizeParams p) {                                             \
    cuda::Dequantize<DataType::T, ElementFormat::kE4M3, CodecPath::P, threads, repeat>::run(p);               \
  }
#define HALFWIRE_REDUCE_VARIANT(path, P, threads, depth, hint, resident)                                      \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)                                   \
      reduce_packet_##path##_##threads##_##depth##_##hint##_##resident(                                       \
          const __grid_constant__ halfwire::ReduceParams p) {                                                 \
    cuda::Reduce<ElementFormat::kE4M3, CodecPath::P, threads, depth, static_cast<LoadHint>(hint)>::toPacket(p); \
  }

#define X(threads, repeat, hint, resident)                                                      \
  HALFWIRE_QUANTIZE_VARIANT(bf16, kBf16, software, kSoftware, threads, repeat, hint, resident)  \
  HALFWIRE_QUANTIZE_VARIANT(fp32, kFp32, software, kSoftware, threads, repeat, hint, resident)
HALFWIRE_QUANTIZE_VARIANTS(X)
#undef X
#define X(threads, repeat, hint, resident)                                                        \
  HALFWIRE_DEQUANTIZE_VARIANT(bf16, kBf16, software, kSoftware, threads, repeat, hint, resident)  \
  HALFWIRE_DEQUANTIZE_VARIANT(fp32, kFp32, software, kSoftware, threads, repeat, hint, resident)
HALFWIRE_DEQUANTIZE_VARIANTS(X)
#undef X
#define X(threads, depth, hint, resident) HALFWIRE_REDUCE_VARIANT(software, kSoftware, threads, depth, hint, resident)
HALFWIRE_REDUCE_VARIANTS(X)
#undef X

#if __CUDA_ARCH__ >= 890
#define X(threads, repeat, hint, resident)                                                      \
  HALFWIRE_QUANTIZE_VARIANT(bf16, kBf16, hardware, kHardware, threads, repeat, hint, resident)  \
  HALFWIRE_QUANTIZE_VARIANT(fp32, kFp32, hardware, kHardware, threads, repeat, hint, resident)
HALFWIRE_QUANTIZE_VARIANTS(X)
#undef X
#define X(threads, repeat, hint, resident)                                                        \
  HALFWIRE_DEQUANTIZE_VARIANT(bf16, kBf16, hardware, kHardware, threads, repeat, hint, resident)  \
  HALFWIRE_DEQUANTIZE_VARIANT(fp32, kFp32, hardware, kHardware, threads, repeat, hint, resident)
HALFWIRE_DEQUANTIZE_VARIANTS(X)
#undef X
#define X(threads, depth, hint, resident) HALFWIRE_REDUCE_VARIANT(hardware, kHardware, threads, depth, hint, resident)
HALFWIRE_REDUCE_VARIANTS(X)
#undef X
#endif
