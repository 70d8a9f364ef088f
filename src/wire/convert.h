// Exact conversions between bf16, fp16 and fp32 by integer arithmetic alone: they do not depend on the
// rounding or flush-to-zero mode of the caller, nor on instructions beyond the x86-64 baseline.
#pragma once

#include <bit>
#include <cstdint>

namespace halfwire {

inline constexpr uint16_t kCanonicalNan16 = 0x7fff;  // of bf16 and of fp16
inline constexpr uint32_t kCanonicalNan32 = 0x7fffffff;

constexpr float bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

constexpr float fp16ToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return std::bit_cast<float>(sign);
  const uint32_t shift =
      static_cast<uint32_t>(std::countl_zero(mantissa)) - 21;  // brings the top bit to 2^10
  return std::bit_cast<float>(sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3ffu) << 13));
}

// Nearest, ties to even; overflow gives infinity, every NaN the canonical one.
constexpr uint16_t floatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return kCanonicalNan16;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Nearest, ties to even; overflow gives infinity, every NaN the canonical one.
constexpr uint16_t floatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return kCanonicalNan16;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude >= 0x38800000u) {                                              // normal in fp16
    const uint32_t rebased = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return static_cast<uint16_t>(sign);  // below 2^-25
  const uint32_t shift = 126 - exponent;                   // units of 2^-24: 14 to 24
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t half = 1u << (shift - 1);
  const uint32_t floor = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t up = rest > half || (rest == half && (floor & 1u)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (floor + up));
}

}  // namespace halfwire
