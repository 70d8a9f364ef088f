// The meaning of the wire format: scalar code in the order of operations of docs/wire-format.md, one rounding
// per operation. Correct on every x86-64; compiled without contraction.
#include "wire/reference.h"

#include <bit>
#include <cmath>

#include "wire/constants.h"
#include "wire/convert.h"
#include "wire/fp_environment.h"
#include "wire/layout.h"

namespace halfwire::reference {
namespace {

float loadElement(DataType type, const void* in, uint64_t i) {
  if (type == DataType::kFp32) {
    float value;
    std::memcpy(&value, static_cast<const uint8_t*>(in) + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const uint8_t*>(in) + 2 * i, 2);
  return type == DataType::kBf16 ? bf16ToFloat(bits) : fp16ToFloat(bits);
}

// Rounds to nearest even; NaN becomes the canonical one.
void storeElement(DataType type, float value, void* out, uint64_t i) {
  if (type == DataType::kFp32) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = kCanonicalNan32;
    std::memcpy(static_cast<uint8_t*>(out) + 4 * i, &bits, 4);
    return;
  }
  const uint16_t bits = type == DataType::kBf16 ? floatToBf16(value) : floatToFp16(value);
  std::memcpy(static_cast<uint8_t*>(out) + 2 * i, &bits, 2);
}

// Writes the scale of a block and returns it as a number.
float writeScale(ScaleFormat format, ElementFormat element, float amax, uint8_t* out) {
  const float r = amax / elementMax(element);
  if (format == ScaleFormat::kFp32) {
    const float scale = r > kMinScale ? r : kMinScale;
    std::memcpy(out, &scale, 4);
    return scale;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(r);
  const uint32_t up = (bits & 0x7fffffu) != 0 ? 1u : 0u;
  const uint32_t exponent = std::max((bits >> 23) + up, 1u);
  *out = static_cast<uint8_t>(exponent);
  return std::bit_cast<float>(exponent << 23);
}

float readScale(ScaleFormat format, const uint8_t* in) {
  if (format == ScaleFormat::kE8M0) return std::bit_cast<float>(uint32_t{*in} << 23);
  float scale;
  std::memcpy(&scale, in, 4);
  return scale;
}

// Nearest code, ties to even, of an eight-bit float; `z` is finite and at most a few units in the last place
// above the largest finite code.
uint8_t encodeFloat8(float z, const RoundingShape& shape) {
  const uint32_t bits = std::bit_cast<uint32_t>(z);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t field = (bits >> 23) & 0xffu;
  const uint32_t exponent = std::max(field, shape.smallest);
  const uint32_t shift = 23 - shape.mantissa + (exponent - field);
  if (field == 0 || shift > 24) return sign;  // below half the smallest code
  const uint32_t significand = (bits & 0x7fffffu) | 0x800000u;
  const uint32_t half = 1u << (shift - 1);
  uint32_t code = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  if (rest > half || (rest == half && (code & 1u))) ++code;
  code += (exponent - shape.smallest)
          << shape.mantissa;  // a carry out of the mantissa goes up one exponent by itself
  return static_cast<uint8_t>(sign | std::min(code, shape.last));
}

uint8_t encodeInt8(float z) {
  const float rounded = std::nearbyint(z);
  const float clamped = rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded;
  return static_cast<uint8_t>(static_cast<int8_t>(clamped));
}

uint8_t encode(ElementFormat format, float z) {
  return format == ElementFormat::kInt8 ? encodeInt8(z) : encodeFloat8(z, roundingShape(format));
}

bool isNonFiniteCode(ElementFormat format, uint8_t code) {
  switch (format) {
    case ElementFormat::kE4M3:
    case ElementFormat::kE3M4:
      return (code & 0x7f) == 0x7f;
    case ElementFormat::kE5M2:
      return (code & 0x7f) >= 0x7c;
    case ElementFormat::kInt8:
      return code == 0x80;
  }
  return true;
}

// The exact value of a code that is not a not-finite code. The float formats are fp16 bits with fewer bits.
float decode(ElementFormat format, uint8_t code) {
  const auto shifted = [code](int mantissa_bits) {
    const auto sign = static_cast<uint16_t>((code & 0x80) << 8);
    const auto magnitude = static_cast<uint16_t>((code & 0x7f) << (10 - mantissa_bits));
    return fp16ToFloat(static_cast<uint16_t>(sign | magnitude));
  };
  switch (format) {
    case ElementFormat::kE4M3:
      return 256.0f * shifted(3);
    case ElementFormat::kE3M4:
      return 4096.0f * shifted(4);
    case ElementFormat::kE5M2:
      return fp16ToFloat(static_cast<uint16_t>(code << 8));
    case ElementFormat::kInt8:
      return static_cast<float>(static_cast<int8_t>(code));
  }
  return 0.0f;
}

float clampTo(float value, float bound) { return value > bound ? bound : value < -bound ? -bound : value; }

// The value of a code under `scale`, NaN for the not-finite codes.
float decodeScaled(ElementFormat format, uint8_t code, float scale, float bound) {
  if (isNonFiniteCode(format, code)) return std::bit_cast<float>(kCanonicalNan32);
  return clampTo(decode(format, code) * scale, bound);
}

// `rounding` for what begins `elements` further on.
Rounding behind(const Rounding& rounding, uint64_t elements) {
  return {rounding.stochastic, rounding.key, rounding.first + elements};
}

template <class Body>
void forEachBlock(const WireFormat& format, uint64_t elements, const Body& body) {
  for (uint64_t start = 0, block = 0; start < elements; start += format.block, ++block) {
    body(block, start, static_cast<uint32_t>(std::min<uint64_t>(format.block, elements - start)));
  }
}

// The three jobs proper. Not inlined, so that no arithmetic moves out of the guarded scope.
[[gnu::noinline]] void quantizeAll(const QuantizeJob& job) {
  const float factor = job.factor.present ? factorValue(job.factor, job.type) : 1.0f;
  for (uint32_t s = 0; s < job.segments; ++s) {
    const Segment segment = segmentAt(s, job.in_pitch, job.in_total, job.segment_elements);
    if (segment.elements == 0) continue;
    const uint8_t* in = static_cast<const uint8_t*>(job.in) + segment.start * dataTypeBytes(job.type);
    uint8_t* packet = static_cast<uint8_t*>(job.out) + s * job.out_pitch;
    uint8_t* scales = packet + scaleOffset(job.format, segment.elements);
    forEachBlock(job.format, segment.elements, [&](uint64_t block, uint64_t start, uint32_t n) {
      quantizeBlock(job.format, job.type, in + start * dataTypeBytes(job.type), n,
                    job.factor.present ? &factor : nullptr, packet + start,
                    scales + block * scaleBytes(job.format.scale),
                    behind(job.rounding, segment.start + start));
    });
    zeroPadding(job.format, segment.elements, packet);
  }
}

[[gnu::noinline]] void dequantizeAll(const DequantizeJob& job) {
  for (uint32_t s = 0; s < job.segments; ++s) {
    const Segment segment = segmentAt(s, job.out_pitch, job.out_total, job.segment_elements);
    if (segment.elements == 0) continue;
    const uint8_t* packet = static_cast<const uint8_t*>(job.in) + s * job.in_pitch;
    const uint8_t* scales = packet + scaleOffset(job.format, segment.elements);
    uint8_t* out = static_cast<uint8_t*>(job.out) + segment.start * dataTypeBytes(job.type);
    forEachBlock(job.format, segment.elements, [&](uint64_t block, uint64_t start, uint32_t n) {
      dequantizeBlock(job.format, job.type, packet + start, scales + block * scaleBytes(job.format.scale), n,
                      out + start * dataTypeBytes(job.type));
    });
  }
}

[[gnu::noinline]] void reduceAll(const ReduceJob& job) {
  forEachBlock(job.format, job.elements,
               [&](uint64_t block, uint64_t, uint32_t n) { reduceBlock(job, block, n); });
  if (job.to_packet) zeroPadding(job.format, job.elements, static_cast<uint8_t*>(job.out));
}

}  // namespace

float factorValue(const Factor& factor, DataType type) {
  return factor.device != nullptr ? loadElement(type, factor.device, 0) : factor.value;
}

void quantizeBlock(const WireFormat& format, DataType type, const void* in, uint32_t n, const float* factor,
                   uint8_t* codes, uint8_t* scale, const Rounding& rounding) {
  float y[kMaxBlock];
  for (uint32_t i = 0; i < n; ++i) {
    const float x = loadElement(type, in, i);
    y[i] = factor != nullptr ? x * *factor : x;
  }
  quantizeFloats(format, type, y, n, codes, scale, rounding);
}

void quantizeFloats(const WireFormat& format, DataType type, const float* y, uint32_t n, uint8_t* codes,
                    uint8_t* scale, const Rounding& rounding) {
  // Magnitudes of floats are ordered like their bits, and every NaN lies above infinity.
  const uint32_t overflow = overflowBits(type);
  uint32_t amax = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(y[i]) & 0x7fffffffu;
    if (magnitude < overflow) amax = std::max(amax, magnitude);
  }
  const float s = writeScale(format.scale, format.element, std::bit_cast<float>(amax), scale);
  const float v = 1.0f / s;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(y[i]) & 0x7fffffffu;
    if (magnitude >= overflow) {
      codes[i] = nonFiniteCode(format.element);
    } else if (rounding.stochastic) {
      codes[i] = stochasticCode(format.element, std::bit_cast<uint32_t>(y[i] * v),
                                roundingBits(rounding.key, rounding.first + i));
    } else {
      codes[i] = encode(format.element, y[i] * v);
    }
  }
}

void dequantizeBlock(const WireFormat& format, DataType type, const uint8_t* codes, const uint8_t* scale,
                     uint32_t n, void* out) {
  const float s = readScale(format.scale, scale);
  for (uint32_t i = 0; i < n; ++i) {
    storeElement(type, decodeScaled(format.element, codes[i], s, typeMax(type)), out, i);
  }
}

void reduceBlock(const ReduceJob& job, uint64_t block, uint32_t n) {
  if (job.packets == 0) return;
  const WireFormat& format = job.format;
  const uint64_t start = block * format.block;
  const uint64_t scale_at = scaleOffset(format, job.elements) + block * scaleBytes(format.scale);
  const float bound = typeMax(job.type) * job.average;
  float acc[kMaxBlock];
  for (uint32_t k = 0; k < job.packets; ++k) {
    const uint8_t* packet = reducePacket(job, k);
    const float s = readScale(format.scale, packet + scale_at) * job.average;
    for (uint32_t i = 0; i < n; ++i) {
      const float t = decodeScaled(format.element, packet[start + i], s, bound);
      acc[i] = k == 0 ? t : acc[i] + t;
    }
  }
  if (job.to_packet) {
    uint8_t* packet = static_cast<uint8_t*>(job.out);
    quantizeFloats(format, job.type, acc, n, packet + start, packet + scale_at, behind(job.rounding, start));
    return;
  }
  uint8_t* out = static_cast<uint8_t*>(job.out) + start * dataTypeBytes(job.type);
  for (uint32_t i = 0; i < n; ++i) storeElement(job.type, acc[i], out, i);
}

void quantize(const QuantizeJob& job) {
  const FpEnvironment environment(kIeeeArithmetic);
  quantizeAll(job);
}

void dequantize(const DequantizeJob& job) {
  const FpEnvironment environment(kIeeeArithmetic);
  dequantizeAll(job);
}

void reduce(const ReduceJob& job) {
  const FpEnvironment environment(kIeeeArithmetic);
  reduceAll(job);
}

}  // namespace halfwire::reference
