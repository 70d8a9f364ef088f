// Kernels of the check program itself: data, comparisons of the arithmetic over whole ranges of floats, and
// the steps of an unfused reduction.
#include "wire/cuda_arithmetic.h"

namespace cuda = halfwire::cuda;
using halfwire::CodecPath;
using halfwire::ElementFormat;

__device__ __forceinline__ uint64_t hash64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Values like gradients: about normal, with a spread of magnitudes from block to block. `bytes` is the
// element's size; bf16 for 2.
extern "C" __global__ void fill_elements(void* out, uint64_t elements, uint32_t bytes, uint64_t seed) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    const uint64_t h = hash64(i ^ seed);
    const float sum = static_cast<float>(h & 0xffff) + static_cast<float>((h >> 16) & 0xffff) +
                      static_cast<float>((h >> 32) & 0xffff) + static_cast<float>(h >> 48) - 131070.0f;
    const float value = ldexpf(sum, -16 - static_cast<int>(hash64((i >> 10) ^ seed) % 12));
    if (bytes == 4) {
      static_cast<float*>(out)[i] = value;
    } else {
      static_cast<uint16_t*>(out)[i] = halfwire::floatToBf16(value);
    }
  }
}

// Adds to *count the bytes in which a and b differ and lowers *first to the smallest such position. Both
// 16-byte aligned.
extern "C" __global__ void compare_bytes(const uint8_t* a, const uint8_t* b, uint64_t bytes,
                                         unsigned long long* count, unsigned long long* first) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x * 16;
  for (uint64_t i = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16; i < bytes; i += stride) {
    if (i + 16 <= bytes) {
      const uint4 x = *reinterpret_cast<const uint4*>(a + i);
      const uint4 y = *reinterpret_cast<const uint4*>(b + i);
      if (x.x == y.x && x.y == y.y && x.z == y.z && x.w == y.w) continue;
    }
    for (uint64_t j = i; j < i + 16 && j < bytes; ++j) {
      if (a[j] == b[j]) continue;
      atomicAdd(count, 1ull);
      atomicMin(first, j);
    }
  }
}

__device__ __forceinline__ void note(bool wrong, uint32_t bits, unsigned long long* count,
                                     unsigned long long* first) {
  if (!wrong) return;
  atomicAdd(count, 1ull);
  atomicMin(first, bits);
}

// reciprocal() against true division for every float from 2^-126 to 2^126.
extern "C" __global__ void compare_reciprocal(unsigned long long* count, unsigned long long* first) {
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint64_t bits = 0x00800000u + blockIdx.x * blockDim.x + threadIdx.x; bits <= 0x7e800000u;
       bits += stride) {
    const float s = cuda::floatOf(static_cast<uint32_t>(bits));
    note(cuda::bitsOf(cuda::reciprocal(s)) != cuda::bitsOf(__frcp_rn(s)), static_cast<uint32_t>(bits), count,
         first);
  }
}

// The scale of every finite amax against true division.
template <ElementFormat F>
__device__ void compareQuotient(unsigned long long* count, unsigned long long* first) {
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint64_t bits = blockIdx.x * blockDim.x + threadIdx.x; bits < 0x7f800000u; bits += stride) {
    const float amax = cuda::floatOf(static_cast<uint32_t>(bits));
    const float got = fmaxf(cuda::quotientByMax<F>(amax), halfwire::kMinScale);
    const float expected = fmaxf(__fdiv_rn(amax, halfwire::elementMax(F)), halfwire::kMinScale);
    note(cuda::bitsOf(got) != cuda::bitsOf(expected), static_cast<uint32_t>(bits), count, first);
  }
}
extern "C" __global__ void compare_quotient_e4m3(unsigned long long* count, unsigned long long* first) {
  compareQuotient<ElementFormat::kE4M3>(count, first);
}
extern "C" __global__ void compare_quotient_e5m2(unsigned long long* count, unsigned long long* first) {
  compareQuotient<ElementFormat::kE5M2>(count, first);
}
extern "C" __global__ void compare_quotient_int8(unsigned long long* count, unsigned long long* first) {
  compareQuotient<ElementFormat::kInt8>(count, first);
}
extern "C" __global__ void compare_quotient_e3m4(unsigned long long* count, unsigned long long* first) {
  compareQuotient<ElementFormat::kE3M4>(count, first);
}

#ifdef HALFWIRE_HARDWARE_FP8
// The two paths' codes of every float whose magnitude is at most a little above M, both signs.
template <ElementFormat F>
__device__ void compareEncode(unsigned long long* count, unsigned long long* first) {
  const uint32_t stride = gridDim.x * blockDim.x;
  const uint32_t last = cuda::bitsOf(halfwire::elementMax(F)) + 8;
  for (uint64_t bits = blockIdx.x * blockDim.x + threadIdx.x; bits <= last; bits += stride) {
    const float z = cuda::floatOf(static_cast<uint32_t>(bits));
    const float four[4] = {z, -z, z, -z};
    const uint32_t hardware = cuda::encode4<F, CodecPath::kHardware>(four);
    note(hardware != cuda::encode4<F, CodecPath::kSoftware>(four), static_cast<uint32_t>(bits), count, first);
  }
}
extern "C" __global__ void compare_encode_e4m3(unsigned long long* count, unsigned long long* first) {
  compareEncode<ElementFormat::kE4M3>(count, first);
}
extern "C" __global__ void compare_encode_e5m2(unsigned long long* count, unsigned long long* first) {
  compareEncode<ElementFormat::kE5M2>(count, first);
}
#endif

// acc += x, as a reduction without fusion does after each dequantize.
extern "C" __global__ void add_fp32(float4* acc, const float4* x, uint64_t vectors) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  float4 a = acc[i];
  const float4 b = x[i];
  a.x = __fadd_rn(a.x, b.x);
  a.y = __fadd_rn(a.y, b.y);
  a.z = __fadd_rn(a.z, b.z);
  a.w = __fadd_rn(a.w, b.w);
  acc[i] = a;
}

extern "C" __global__ void empty(const __grid_constant__ halfwire::QuantizeParams) {}
