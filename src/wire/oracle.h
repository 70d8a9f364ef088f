// The wire format a second time, for tests: from its definitions, in extended precision and by search,
// sharing no code with the reference. Values are long double (64 bits of mantissa), in which every product of
// two floats is exact and a quotient of two floats that is rounded again to a float rounds as the exact one
// does.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "wire/format.h"
#include "wire/test_support.h"

namespace halfwire::test::oracle {

using Real = long double;

inline constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
inline constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

// Nearest even to `precision` bits, or fewer below 2^min_exponent.
inline Real roundTo(Real x, int precision, int min_exponent, Real overflow) {
  if (x == 0 || !std::isfinite(x)) return x;
  const Real unit = std::ldexp(Real{1}, std::max(std::ilogb(x), min_exponent) - precision + 1);
  const Real rounded = std::copysign(std::rint(x / unit) * unit, x);
  return std::fabs(rounded) >= overflow ? std::copysign(kInfinity, x) : rounded;
}

inline Real toFloat(Real x) { return roundTo(x, 24, -126, std::ldexp(Real{1}, 128)); }

inline Real toType(DataType type, Real x) {
  switch (type) {
    case DataType::kBf16:
      return roundTo(x, 8, -126, std::ldexp(Real{1}, 128));
    case DataType::kFp16:
      return roundTo(x, 11, -14, 65536);
    case DataType::kFp32:
      return toFloat(x);
  }
  return kNan;
}

inline Real largest(DataType type) {
  return type == DataType::kFp16   ? Real{65504}
         : type == DataType::kBf16 ? std::ldexp(Real{255}, 120)
                                   : std::ldexp(Real{16777215}, 104);
}

// The bits of a value that `type` holds exactly; NaN in its canonical form.
inline uint32_t bitsOf(DataType type, Real x) {
  if (std::isnan(x)) return type == DataType::kFp32 ? 0x7fffffffu : 0x7fffu;
  const auto value = static_cast<float>(x);  // exact
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (type == DataType::kFp32) return bits;
  if (type == DataType::kBf16) return bits >> 16;
  const uint32_t sign = std::signbit(x) ? 0x8000u : 0;
  if (std::isinf(x)) return sign | 0x7c00u;
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), -14);
  const auto mantissa =
      static_cast<uint32_t>(std::ldexp(std::fabs(x), 10 - exponent));  // the implicit bit is bit 10
  return sign | ((mantissa < 1024 ? 0u : static_cast<uint32_t>(exponent + 14) << 10) + mantissa);
}

struct Format8 {
  int mantissa_bits, bias;
  uint32_t codes;  // non-negative finite codes
};

inline Format8 format8(ElementFormat element) {
  if (element == ElementFormat::kE3M4) return {4, 3, 0x7f};
  return element == ElementFormat::kE4M3 ? Format8{3, 7, 0x7f} : Format8{2, 15, 0x7c};
}

// The value of a code, NaN for those that say "not finite".
inline Real decode(ElementFormat element, uint8_t code) {
  if (element == ElementFormat::kInt8)
    return code == 0x80 ? kNan : static_cast<Real>(static_cast<int8_t>(code));
  const Format8 f = format8(element);
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude >= f.codes) return kNan;
  const int field = static_cast<int>(magnitude >> f.mantissa_bits);
  const Real fraction = std::ldexp(Real(magnitude & ((1u << f.mantissa_bits) - 1)), -f.mantissa_bits);
  const Real value = field == 0 ? std::ldexp(fraction, 1 - f.bias) : std::ldexp(1 + fraction, field - f.bias);
  return (code & 0x80) != 0 ? -value : value;
}

// The values of the non-negative finite codes, ascending.
inline const std::vector<Real>& magnitudes(ElementFormat element) {
  static const std::array<std::vector<Real>, 4> all = [] {
    std::array<std::vector<Real>, 4> tables;
    for (ElementFormat e : kElementFormats) {
      std::vector<Real>& table = tables[static_cast<size_t>(e)];
      for (uint32_t code = 0; code < 128; ++code) {
        const Real value = decode(e, static_cast<uint8_t>(code));
        if (!std::isnan(value)) table.push_back(value);
      }
    }
    return tables;
  }();
  return all[static_cast<size_t>(element)];
}

// The nearest finite code by search, ties to the even code, zero with its sign where the format has one.
inline uint8_t encode(ElementFormat element, Real z) {
  const std::vector<Real>& values = magnitudes(element);
  const Real magnitude = std::fabs(z);
  size_t best =
      static_cast<size_t>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin()) - 1;
  if (best + 1 < values.size()) {
    const Real below = magnitude - values[best], above = values[best + 1] - magnitude;
    if (above < below || (above == below && best % 2 == 1)) ++best;
  }
  const auto code = static_cast<int>(best);
  if (!std::signbit(z)) return static_cast<uint8_t>(code);
  return static_cast<uint8_t>(element == ElementFormat::kInt8 ? -code : code | 0x80);
}

inline Real readScale(const WireFormat& format, const uint8_t* scale) {
  if (format.scale == ScaleFormat::kE8M0) return std::ldexp(Real{1}, *scale - 127);
  float value;
  std::memcpy(&value, scale, 4);
  return value;
}

// One block of values that fp32 holds.
inline void quantizeBlock(const WireFormat& format, DataType type, const std::vector<Real>& y, uint8_t* codes,
                          uint8_t* scale) {
  const Real top = format.element == ElementFormat::kInt8   ? Real{127}
                   : format.element == ElementFormat::kE4M3 ? Real{448}
                   : format.element == ElementFormat::kE3M4 ? Real{30}
                                                            : Real{57344};
  const auto finite = [&](Real v) { return std::isfinite(toType(type, v)); };
  Real amax = 0;
  for (Real v : y) {
    if (finite(v)) amax = std::max(amax, std::fabs(v));
  }
  const Real ratio = toFloat(amax / top);
  Real s = std::ldexp(Real{1}, -126);
  if (format.scale == ScaleFormat::kFp32) {
    s = std::max(s, ratio);
    const auto value = static_cast<float>(s);
    std::memcpy(scale, &value, 4);
  } else {
    *scale = 1;
    while (s < ratio) {
      s *= 2;
      ++*scale;
    }
  }
  const Real inverse = toFloat(1 / s);
  for (size_t i = 0; i < y.size(); ++i) {
    codes[i] = finite(y[i])                             ? encode(format.element, toFloat(y[i] * inverse))
               : format.element == ElementFormat::kInt8 ? uint8_t{0x80}
                                                        : uint8_t{0x7f};
  }
}

inline Packet quantize(const WireFormat& format, const Elements& in, const float* factor) {
  const uint64_t n = in.count();
  const uint64_t padded = (n + 15) / 16 * 16;
  const uint64_t blocks = (n + format.block - 1) / format.block;
  const uint64_t scale_size = format.scale == ScaleFormat::kFp32 ? 4 : 1;
  Packet packet(padded + (blocks * scale_size + 15) / 16 * 16);
  for (uint64_t b = 0; b < blocks; ++b) {
    std::vector<Real> y;
    for (uint64_t i = b * format.block; i < std::min<uint64_t>(n, (b + 1) * format.block); ++i) {
      const Real x = in.value(i);
      y.push_back(factor != nullptr ? toFloat(x * Real{*factor}) : x);
    }
    quantizeBlock(format, in.type(), y, packet.data() + b * format.block,
                  packet.data() + padded + b * scale_size);
  }
  return packet;
}

// The value of element `i` of a packet of `n` under its scale times `average`, clamped; NaN if it is not
// finite.
inline Real term(const WireFormat& format, DataType type, const uint8_t* packet, uint64_t n, uint64_t i,
                 float average) {
  const Real q = decode(format.element, packet[i]);
  if (std::isnan(q)) return q;
  const uint64_t scale_size = format.scale == ScaleFormat::kFp32 ? 4 : 1;
  const Real s = readScale(format, packet + (n + 15) / 16 * 16 + i / format.block * scale_size);
  const Real bound = toFloat(largest(type) * Real{average});
  return std::clamp(toFloat(q * toFloat(s * Real{average})), -bound, bound);
}

inline Elements dequantize(const WireFormat& format, const Packet& packet, DataType type, uint64_t n) {
  Elements out(type, n);
  for (uint64_t i = 0; i < n; ++i) {
    out.setBits(i, bitsOf(type, toType(type, term(format, type, packet.data(), n, i, 1.0f))));
  }
  return out;
}

// The fp32 sums of a job without an own packet.
inline std::vector<Real> sums(const ReduceJob& job) {
  std::vector<Real> out;
  for (uint64_t i = 0; i < job.elements; ++i) {
    Real sum = 0;
    for (uint32_t k = 0; k < job.packets; ++k) {
      const auto* packet = static_cast<const uint8_t*>(job.in) + k * job.in_pitch;
      const Real t = term(job.format, job.type, packet, job.elements, i, job.average);
      sum = k == 0 ? t : toFloat(sum + t);
    }
    out.push_back(sum);
  }
  return out;
}

}  // namespace halfwire::test::oracle
