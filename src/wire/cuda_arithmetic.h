// The arithmetic of docs/wire-format.md as the CUDA kernels do it, on groups of four elements. Everything but
// the hardware path also compiles for the host, where a test holds it against the scalar reference bit for
// bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "wire/constants.h"
#include "wire/convert.h"
#include "wire/cuda_params.h"
#include "wire/format.h"
#include "wire/rounding.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HALFWIRE_HOST_DEVICE __host__ __device__ __forceinline__
#define HALFWIRE_UNROLL _Pragma("unroll")
#else
#define HALFWIRE_HOST_DEVICE inline
#define HALFWIRE_UNROLL
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define HALFWIRE_HARDWARE_FP8 1
#endif

namespace halfwire::cuda {

HALFWIRE_HOST_DEVICE uint32_t bitsOf(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

HALFWIRE_HOST_DEVICE float floatOf(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// One rounding each, never contracted.
HALFWIRE_HOST_DEVICE float mulRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

HALFWIRE_HOST_DEVICE float addRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

HALFWIRE_HOST_DEVICE float fmaRn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

HALFWIRE_HOST_DEVICE uint32_t maxOf(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Bytes `selector` (four nibbles, lowest first) of the eight bytes b:a.
HALFWIRE_HOST_DEVICE uint32_t pickBytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = (uint64_t{b} << 32) | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
  }
  return out;
#endif
}

HALFWIRE_HOST_DEVICE float canonicalNan() { return floatOf(kCanonicalNan32); }

// ---- scales ----

// RN(1 / s) for 2^-126 <= s <= 2^126. On the device: the hardware's approximation, one Newton step with an
// exact residual; right for every mantissa (cuda_check compares all of them with true division).
HALFWIRE_HOST_DEVICE float reciprocal(float s) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(s));
  return fmaRn(fmaRn(-s, y, 1.0f), y, y);
#else
  return 1.0f / s;
#endif
}

// RN(amax / M) for finite amax >= 0 wherever that is at least 2^-126, and something at most 2^-126 elsewhere:
// there the scale is 2^-126 whatever the quotient. Division by a constant as a product with its reciprocal
// and a correction by the exact residual; tiny amax is lifted first, so that the residual does not underflow.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE float quotientByMax(float amax) {
  constexpr float kMax = elementMax(F);
  constexpr float kReciprocal = 1.0f / kMax;
  const bool tiny = amax < 0x1p-60f;
  const float a = tiny ? mulRn(amax, 0x1p64f) : amax;
  const float q = mulRn(a, kReciprocal);
  const float exact = fmaRn(fmaRn(-q, kMax, a), kReciprocal, q);
  return tiny ? mulRn(exact, 0x1p-64f) : exact;
}

// The scale of a block as stored (fp32 bits, or the byte E) and v of step 5.
struct BlockScale {
  uint32_t stored;
  float v;
};

template <ElementFormat F>
HALFWIRE_HOST_DEVICE BlockScale blockScale(ScaleFormat format, uint32_t amax_bits) {
  const float r = quotientByMax<F>(floatOf(amax_bits));
  if (format == ScaleFormat::kFp32) {
    const float s = r > kMinScale ? r : kMinScale;
    return {bitsOf(s), reciprocal(s)};
  }
  const uint32_t exponent = maxOf((bitsOf(r) + 0x7fffffu) >> 23, 1u);
  return {exponent, floatOf((254u - exponent) << 23)};
}

// ---- codes from numbers ----

// Low bytes of four words as one word.
HALFWIRE_HOST_DEVICE uint32_t packLowBytes(const uint32_t (&c)[4]) {
  return pickBytes(pickBytes(c[0], c[1], 0x0040), pickBytes(c[2], c[3], 0x0040), 0x5410);
}

// Four codes of an eight-bit float with kMantissa bits whose smallest normal number has fp32 exponent field
// kSmallest; |z| is finite and rounds to no more than the largest code. Adding the power of two 2^(23 -
// kMantissa) above z makes fp32's own rounding leave exactly the kept bits at the bottom of the sum.
template <uint32_t kMantissa, uint32_t kSmallest>
HALFWIRE_HOST_DEVICE uint32_t encodeFloat8(const float (&z)[4]) {
  constexpr uint32_t kShift = 23 - kMantissa;
  constexpr float kLift = static_cast<float>(1u << kShift);
  uint32_t code[4];
  HALFWIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t exponent = maxOf(bitsOf(z[i]) & 0x7f800000u, kSmallest << 23);
    const float sum = fmaRn(floatOf(exponent), kLift, floatOf(bitsOf(z[i]) & 0x7fffffffu));
    code[i] = bitsOf(sum) + (exponent >> kShift) - (kSmallest << kMantissa);
  }
  const uint32_t signs = pickBytes(pickBytes(bitsOf(z[0]), bitsOf(z[1]), 0x0073),
                                   pickBytes(bitsOf(z[2]), bitsOf(z[3]), 0x0073), 0x5410);
  return packLowBytes(code) | (signs & 0x80808080u);
}

// Four codes of int8; |z| <= 127.5. Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
HALFWIRE_HOST_DEVICE uint32_t encodeInt8(const float (&z)[4]) {
  uint32_t code[4];
  HALFWIRE_UNROLL
  for (int i = 0; i < 4; ++i) code[i] = bitsOf(addRn(z[i], 12582912.0f));
  return packLowBytes(code);
}

#ifdef HALFWIRE_HARDWARE_FP8
template <ElementFormat F>
__device__ __forceinline__ uint32_t encodeHardware(const float (&z)[4]) {
  uint16_t low;
  uint16_t high;
  if constexpr (F == ElementFormat::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(z[1]), "f"(z[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(z[3]), "f"(z[2]));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(z[1]), "f"(z[0]));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(z[3]), "f"(z[2]));
  }
  return uint32_t{low} | (uint32_t{high} << 16);
}
#endif

// The codes of four finite elements, first in the lowest byte. |z| may exceed M by a few units in the last
// place (rounding in steps 4 and 5), which rounds to M by itself: no clamp.
template <ElementFormat F, CodecPath P>
HALFWIRE_HOST_DEVICE uint32_t encode4(const float (&z)[4]) {
  if constexpr (F == ElementFormat::kInt8) return encodeInt8(z);
#ifdef HALFWIRE_HARDWARE_FP8
  if constexpr (F != ElementFormat::kInt8 && F != ElementFormat::kE3M4 && P == CodecPath::kHardware)
    return encodeHardware<F>(z);
#endif
  if constexpr (F == ElementFormat::kE4M3) return encodeFloat8<3, 121>(z);
  if constexpr (F == ElementFormat::kE3M4) return encodeFloat8<4, 125>(z);
  return encodeFloat8<2, 113>(z);
}

// The same rounded stochastically: z[i] is number index + i under `key`.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE uint32_t encodeStochastic4(const float (&z)[4], uint64_t key, uint64_t index) {
  uint32_t codes = 0;
  HALFWIRE_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    codes |= uint32_t{stochasticCode(F, bitsOf(z[i]), roundingBits(key, index + i))} << (8 * i);
  }
  return codes;
}

// The not-finite code in each byte whose element is not finite, else the byte of `codes`.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE uint32_t markNonFinite(uint32_t codes, const float (&y)[4], uint32_t overflow_bits) {
  HALFWIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if ((bitsOf(y[i]) & 0x7fffffffu) >= overflow_bits) {
      codes = (codes & ~(0xffu << (8 * i))) | (uint32_t{nonFiniteCode(F)} << (8 * i));
    }
  }
  return codes;
}

// ---- numbers from codes ----

// Bit 7 of each byte that is a not-finite code.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE uint32_t nonFiniteBytes(uint32_t codes) {
  if constexpr (F == ElementFormat::kE4M3 || F == ElementFormat::kE3M4)
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  if constexpr (F == ElementFormat::kE5M2) return ((codes & 0x7f7f7f7fu) + 0x04040404u) & 0x80808080u;
  const uint32_t x = codes ^ 0x80808080u;  // a byte is 0 exactly where the code is -128
  return ~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
}

// Not 0 exactly where some byte is a not-finite code; cheaper than knowing which.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE uint32_t anyNonFinite(uint32_t codes) {
  if constexpr (F != ElementFormat::kInt8) return nonFiniteBytes<F>(codes);
  const uint32_t x = codes ^ 0x80808080u;
  return (x - 0x01010101u) & ~x & 0x80808080u;
}

// Whether decode4 itself turns not-finite codes into NaN.
template <ElementFormat F, CodecPath P>
inline constexpr bool kDecodesNan = F == ElementFormat::kE4M3 && P == CodecPath::kHardware;

HALFWIRE_HOST_DEVICE void halvesToFloats(uint32_t halves, float& low, float& high) {
#ifdef __CUDA_ARCH__
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  low = both.x;
  high = both.y;
#else
  low = fp16ToFloat(static_cast<uint16_t>(halves));
  high = fp16ToFloat(static_cast<uint16_t>(halves >> 16));
#endif
}

// The exact values of four codes. Not-finite ones are NaN where kDecodesNan, else any number or infinity.
template <ElementFormat F, CodecPath P>
HALFWIRE_HOST_DEVICE void decode4(uint32_t codes, float (&q)[4]) {
  if constexpr (F == ElementFormat::kInt8) {
    const uint32_t biased = codes ^ 0x80808080u;
    HALFWIRE_UNROLL
    for (int i = 0; i < 4; ++i) {
      // 2^23 + 128 + code as fp32 bits
      q[i] = addRn(floatOf(pickBytes(biased, 0x4b000000u, 0x7650u | static_cast<uint32_t>(i))), -8388736.0f);
    }
    return;
  }
  if constexpr (F == ElementFormat::kE5M2) {  // the upper half of an fp16 number
    halvesToFloats(pickBytes(codes, 0, 0x1404), q[0], q[1]);
    halvesToFloats(pickBytes(codes, 0, 0x3424), q[2], q[3]);
    return;
  }
#ifdef HALFWIRE_HARDWARE_FP8
  if constexpr (F == ElementFormat::kE4M3 && P == CodecPath::kHardware) {
    uint32_t halves[2];
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves[0]) : "h"(static_cast<uint16_t>(codes)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves[1]) : "h"(static_cast<uint16_t>(codes >> 16)));
    halvesToFloats(halves[0], q[0], q[1]);
    halvesToFloats(halves[1], q[2], q[3]);
    return;
  }
#endif
  constexpr bool kWide = F == ElementFormat::kE3M4;
  HALFWIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Exponent and mantissa at the bottom of fp32's exponent and the top of its mantissa are the value times
    // 2^-120 (e3m4: 2^-124), subnormals included.
    const auto top = static_cast<int32_t>(pickBytes(codes, 0, 0x0444u | (static_cast<uint32_t>(i) << 12)));
    const uint32_t bits = static_cast<uint32_t>(kWide ? top >> 5 : top >> 4);
    q[i] = mulRn(floatOf(bits & (kWide ? 0x83f80000u : 0x87f00000u)), kWide ? 0x1p124f : 0x1p120f);
  }
}

// Step 2 of Reduce, and Dequantize's clamp, for any scale; NaN stays NaN.
HALFWIRE_HOST_DEVICE float clampTo(float value, float bound) {
  return value > bound ? bound : value < -bound ? -bound : value;
}

// Whether no code can leave [-bound, bound] under scale s, so that the clamp can be left out.
template <ElementFormat F>
HALFWIRE_HOST_DEVICE bool withinBound(float s, float bound) {
  return mulRn(std::fabs(s), elementMax(F)) <= bound;
}

// t of step 2 of Reduce for four codes under scale s: `plain` says that neither NaN nor the clamp can occur.
template <ElementFormat F, CodecPath P>
HALFWIRE_HOST_DEVICE void decodeScaled4(uint32_t codes, float s, float bound, bool plain, float (&t)[4]) {
  decode4<F, P>(codes, t);
  if (plain) {
    HALFWIRE_UNROLL
    for (int i = 0; i < 4; ++i) t[i] = mulRn(t[i], s);
    return;
  }
  const uint32_t bad = nonFiniteBytes<F>(codes);
  HALFWIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = clampTo(mulRn(t[i], s), bound);
    if ((bad >> (8 * i)) & 0x80u) t[i] = canonicalNan();
  }
}

// ---- elements ----

// The values of the elements in one 32-bit word of memory: two of a 16-bit type, one of fp32.
template <DataType T>
HALFWIRE_HOST_DEVICE void loadWord(uint32_t word, float* out) {
  if constexpr (T == DataType::kFp32) {
    out[0] = floatOf(word);
  } else if constexpr (T == DataType::kBf16) {
    out[0] = floatOf(word << 16);
    out[1] = floatOf(word & 0xffff0000u);
  } else {
    halvesToFloats(word, out[0], out[1]);
  }
}

// Rounds to nearest even into T, NaN to the canonical one; the reverse of loadWord.
template <DataType T>
HALFWIRE_HOST_DEVICE uint32_t storeWord(const float* in) {
  if constexpr (T == DataType::kFp32) {
    return in[0] != in[0] ? kCanonicalNan32 : bitsOf(in[0]);
  } else if constexpr (T == DataType::kBf16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
    return word;
#else
    return uint32_t{floatToBf16(in[0])} | (uint32_t{floatToBf16(in[1])} << 16);
#endif
  } else {
#if defined(__CUDA_ARCH__)
    const __half2 word = __floats2half2_rn(in[0], in[1]);
    return *reinterpret_cast<const uint32_t*>(&word);
#else
    return uint32_t{floatToFp16(in[0])} | (uint32_t{floatToFp16(in[1])} << 16);
#endif
  }
}

}  // namespace halfwire::cuda
