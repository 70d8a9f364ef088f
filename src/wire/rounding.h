// Stochastic rounding: a value between two codes becomes the upper one with the probability of its distance
// from the lower one, so that the mean of many roundings is the value. The same arithmetic on the host and in
// the kernels. docs/wire-format.md, "Stochastic rounding".
#pragma once

#include <cstdint>

#include "wire/format.h"
#include "wire/perturb.h"

namespace halfwire {

// How codes are rounded. Element i of a message's buffer takes the random bits of number i under `key`;
// `first` is the index of the first element of a job.
struct Rounding {
  bool stochastic = false;  // else to nearest even, and the rest means nothing
  uint64_t key = 0;
  uint64_t first = 0;
};

// The key of one rounding of a message: nothing else goes into the random bits. `phase`: 0 where the
// program's elements become packets, 1 where sums do.
constexpr uint64_t roundingKey(uint64_t seed, uint64_t communicator, uint64_t call, uint32_t rank,
                               uint32_t phase) {
  return splitMix64(splitMix64(splitMix64(seed, communicator), call), uint64_t{rank} * 2 + phase);
}

constexpr uint32_t roundingBits(uint64_t key, uint64_t index) {
  return static_cast<uint32_t>(splitMix64(key, index) >> 32);
}

// A format's magnitudes as those of an eight-bit float: bits of mantissa, fp32's exponent field of the
// smallest normal number, the largest finite code. int8 is one whose numbers are all subnormal.
struct RoundingShape {
  uint32_t mantissa, smallest, last;
};

constexpr RoundingShape roundingShape(ElementFormat f) {
  switch (f) {
    case ElementFormat::kE4M3:
      return {3, 121, 0x7e};
    case ElementFormat::kE5M2:
      return {2, 113, 0x7b};
    case ElementFormat::kE3M4:
      return {4, 125, 0x7e};
    case ElementFormat::kInt8:
      break;
  }
  return {7, 134, 127};
}

// The code of a finite z, given as fp32 bits: the lower neighbour of |z|, or the upper one for the largest of
// the 2^32 values of `random`, as many as |z| lies above the lower one in units of 2^-32 of the way (rounded
// down).
constexpr uint8_t stochasticCode(ElementFormat format, uint32_t z, uint32_t random) {
  const RoundingShape shape = roundingShape(format);
  const uint32_t bits = z & 0x7fffffffu;
  const uint32_t stored = bits >> 23;
  const uint32_t field = stored > 0 ? stored : 1;
  const uint32_t significand = stored > 0 ? (bits & 0x7fffffu) | 0x800000u : bits;
  const uint32_t exponent = field > shape.smallest ? field : shape.smallest;
  const uint32_t shift = 23 - shape.mantissa + (exponent - field);
  const uint32_t whole = shift < 32 ? significand >> shift : 0;
  const uint32_t fraction = shift < 64 ? static_cast<uint32_t>((uint64_t{significand} << 32) >> shift) : 0;
  const uint32_t up = fraction + random < fraction ? 1 : 0;  // carries out of 32 bits
  uint32_t code = whole + up + ((exponent - shape.smallest) << shape.mantissa);
  if (code > shape.last) code = shape.last;
  const bool negative = z >> 31 != 0;
  if (format == ElementFormat::kInt8) return static_cast<uint8_t>(negative ? 0u - code : code);
  return static_cast<uint8_t>(negative ? code | 0x80u : code);
}

}  // namespace halfwire
