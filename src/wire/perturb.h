// Noise of one ulp of bf16, the same arithmetic on the host and in the kernels: what `--mode noise` adds to
// the results of reductions, to show what a run's own chaos makes of the smallest change.
#pragma once

#include <cstdint>

#include "wire/format.h"

namespace halfwire {

// Adds to every element of `data` one ulp of bf16 at its magnitude, up or down by a hash of seed and index.
// Zeros, elements that are not finite, those no larger than the step and those that would overflow stay as
// they are. `data` is aligned to its element type.
struct PerturbJob {
  DataType type = DataType::kBf16;
  void* data = nullptr;
  uint64_t elements = 0;
  uint64_t seed = 0;
};

// What perturbing needs to know of a type, in units of its last place.
struct PerturbStep {
  uint32_t step;       // one ulp of bf16
  uint32_t infinity;   // bits
  uint32_t magnitude;  // mask of all but the sign
};

constexpr PerturbStep perturbStep(DataType type) {
  switch (type) {
    case DataType::kBf16:
      return {1, 0x7f80, 0x7fff};
    case DataType::kFp16:
      return {8, 0x7c00, 0x7fff};
    case DataType::kFp32:
      break;
  }
  return {1u << 16, 0x7f800000, 0x7fffffff};
}

// Number `index` of the sequence that SplitMix64 (Steele, Lea, Flood 2014) makes of a seed.
constexpr uint64_t splitMix64(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr bool perturbsUp(uint64_t seed, uint64_t index) { return splitMix64(seed, index) >> 63 != 0; }

constexpr uint32_t perturbed(uint32_t bits, const PerturbStep& s, uint64_t seed, uint64_t index) {
  const uint32_t magnitude = bits & s.magnitude;
  if (magnitude >= s.infinity || magnitude <= s.step) return bits;
  if (!perturbsUp(seed, index)) return bits - s.step;
  return magnitude + s.step >= s.infinity ? bits : bits + s.step;
}

// On the host. Thread-safe.
void perturb(const PerturbJob& job);

}  // namespace halfwire
