// Random numbers that are the same on every machine and with every standard library.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace halfwire::soak {

// SplitMix64 (Steele, Lea and Flood 2014) as a hash of one value.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr uint64_t mix(uint64_t a, uint64_t b) { return mix(mix(a) ^ (b * 0x9e3779b97f4a7c15ull)); }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}

  uint64_t next() { return mix(state_++); }
  // In [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  // True in `percent` of 100 cases.
  bool chance(int percent) { return between(0, 99) < percent; }
  // In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(between(0, static_cast<int64_t>(from.size()) - 1))];
  }
  template <class T>
  void shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i)
      std::swap((*values)[i - 1], (*values)[static_cast<size_t>(between(0, static_cast<int64_t>(i) - 1))]);
  }

 private:
  uint64_t state_;
};

}  // namespace halfwire::soak
