// The kernels of the default format in every shape of variants.h, hardware path.
#include "wire/cuda_check/variants.h"
#include "wire/cuda_kernels.h"

namespace cuda = halfwire::cuda;
using halfwire::CodecPath;
using halfwire::DataType;
using halfwire::ElementFormat;
using halfwire::LoadHint;

#if __CUDA_ARCH__ >= 890
#define HALFWIRE_VARIANT(type, T, threads, repeat, hint, resident)                              \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)                     \
      quantize_##type##_##threads##_##repeat##_##hint##_##resident(                             \
          const __grid_constant__ halfwire::QuantizeParams p) {                                 \
    cuda::Quantize<DataType::T, ElementFormat::kE4M3, CodecPath::kHardware, 1, threads, repeat, \
                   static_cast<LoadHint>(hint)>::run(p);                                        \
  }
#define X(threads, repeat, hint, resident)                       \
  HALFWIRE_VARIANT(bf16, kBf16, threads, repeat, hint, resident) \
  HALFWIRE_VARIANT(fp32, kFp32, threads, repeat, hint, resident)
HALFWIRE_QUANTIZE_VARIANTS(X)
#undef X
#undef HALFWIRE_VARIANT

#define HALFWIRE_VARIANT(type, T, threads, repeat, hint, resident)                                      \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)                             \
      dequantize_##type##_##threads##_##repeat##_##hint##_##resident(                                   \
          const __grid_constant__ halfwire::DequantizeParams p) {                                       \
    cuda::Dequantize<DataType::T, ElementFormat::kE4M3, CodecPath::kHardware, threads, repeat>::run(p); \
  }
#define X(threads, repeat, hint, resident)                       \
  HALFWIRE_VARIANT(bf16, kBf16, threads, repeat, hint, resident) \
  HALFWIRE_VARIANT(fp32, kFp32, threads, repeat, hint, resident)
HALFWIRE_DEQUANTIZE_VARIANTS(X)
#undef X
#undef HALFWIRE_VARIANT

#define X(threads, depth, hint, resident)                                    \
  extern "C" __global__ void __launch_bounds__(threads, resident / threads)  \
      reduce_packet_##threads##_##depth##_##hint##_##resident(               \
          const __grid_constant__ halfwire::ReduceParams p) {                \
    cuda::Reduce<ElementFormat::kE4M3, CodecPath::kHardware, threads, depth, \
                 static_cast<LoadHint>(hint)>::toPacket(p);                  \
  }
HALFWIRE_REDUCE_VARIANTS(X)
#undef X
#endif
