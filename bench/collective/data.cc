#include "data.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

namespace halfwire::bench {
namespace {

uint64_t mix(uint64_t x) {
  // splitmix64 (Steele, Lea and Flood 2014).
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Box and Muller 1958: pair p of a rank gives elements 2p and 2p + 1.
void normalPair(uint32_t rank, uint64_t pair, float out[2]) {
  const uint64_t bits = mix(mix(pair) ^ (uint64_t{rank} << 40));
  const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
  const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
  const float radius = std::sqrt(-2.0f * std::log(u));
  out[0] = radius * std::cos(2.0f * std::numbers::pi_v<float> * v);
  out[1] = radius * std::sin(2.0f * std::numbers::pi_v<float> * v);
}

uint16_t toBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Normal and subnormal fp16 of |x| < 65520, to nearest even.
uint16_t toFp16(float x) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const float a = std::fabs(x);
  if (a < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 0x1p24f)));
  const uint32_t bits = std::bit_cast<uint32_t>(a);
  return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13));
}

double fromFp16(uint16_t h) {
  const int exponent = h >> 10 & 31;
  const double m = h & 1023;
  double value = exponent == 0 ? std::ldexp(m, -24) : std::ldexp(m + 1024, exponent - 25);
  if (exponent == 31) value = m == 0 ? INFINITY : NAN;
  return h & 0x8000 ? -value : value;
}

}  // namespace

void fillNormal(DataType type, uint32_t rank, uint64_t begin, uint64_t count, void* out) {
  for (uint64_t i = 0; i < count;) {
    float pair[2];
    normalPair(rank, (begin + i) / 2, pair);
    for (uint64_t k = (begin + i) % 2; k < 2 && i < count; ++k, ++i) {
      switch (type) {
        case DataType::kBf16:
          static_cast<uint16_t*>(out)[i] = toBf16(pair[k]);
          break;
        case DataType::kFp16:
          static_cast<uint16_t*>(out)[i] = toFp16(pair[k]);
          break;
        case DataType::kFp32:
          static_cast<float*>(out)[i] = pair[k];
          break;
      }
    }
  }
}

void toDouble(DataType type, const void* in, uint64_t count, double* out) {
  for (uint64_t i = 0; i < count; ++i) {
    switch (type) {
      case DataType::kBf16:
        out[i] = std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(in)[i]} << 16);
        break;
      case DataType::kFp16:
        out[i] = fromFp16(static_cast<const uint16_t*>(in)[i]);
        break;
      case DataType::kFp32:
        out[i] = static_cast<const float*>(in)[i];
        break;
    }
  }
}

uint64_t hashBytes(const void* data, uint64_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t hash = 0xcbf29ce484222325ull;
  const auto step = [&](uint64_t word) { hash = (hash ^ word) * 0x100000001b3ull, hash ^= hash >> 32; };
  uint64_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    step(word);
  }
  for (; i < bytes; ++i) step(p[i]);
  return hash;
}

}  // namespace halfwire::bench
