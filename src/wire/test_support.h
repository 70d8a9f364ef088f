// What the tests of the wire share: every implementation on this machine, formats, buffers and inputs of
// every make.
#pragma once

#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/constants.h"
#include "wire/fp_environment.h"
#include "wire/simd.h"

namespace halfwire::test {

// One way to run the jobs: a SIMD target of this machine.
struct Implementation {
  const SimdTarget* target;

  std::string name() const { return target->name; }
  void run(const QuantizeJob& job) const {
    const FpEnvironment environment(kIeeeArithmetic);
    target->quantize(job);
  }
  void run(const DequantizeJob& job) const {
    const FpEnvironment environment(kIeeeArithmetic);
    target->dequantize(job);
  }
  void run(const ReduceJob& job) const {
    const FpEnvironment environment(kIeeeArithmetic);
    target->reduce(job);
  }
};

inline std::vector<Implementation> simdImplementations() {
  std::vector<Implementation> all;
  for (const SimdTarget& target : simdTargets()) all.push_back({&target});
  return all;
}

inline std::vector<WireFormat> allFormats() {
  std::vector<WireFormat> formats;
  for (ElementFormat element : kElementFormats) {
    for (ScaleFormat scale : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
      for (uint16_t block : {32, 64, 128, 256}) formats.push_back({element, scale, block});
    }
  }
  return formats;
}

inline const char* name(ElementFormat f) {
  return elementFormatName(f);
}
inline const char* name(ScaleFormat f) { return f == ScaleFormat::kFp32 ? "fp32" : "e8m0"; }
inline const char* name(DataType t) {
  return t == DataType::kBf16 ? "bf16" : t == DataType::kFp16 ? "fp16" : "fp32";
}
inline std::string name(const WireFormat& f) {
  return std::string(name(f.element)) + "/" + name(f.scale) + "/" + std::to_string(f.block);
}

inline constexpr DataType kTypes[] = {DataType::kBf16, DataType::kFp16, DataType::kFp32};

// Elements of a data type in their own bits. `offset` elements of slack in front move the data off its
// natural alignment; whatever lies outside is watched by AddressSanitizer and by `intact`.
class Elements {
 public:
  Elements(DataType type, uint64_t count, uint64_t offset = 0)
      : type_(type), count_(count), offset_(offset), bytes_(size(offset) + size(count) + kGuard, kFill) {}

  DataType type() const { return type_; }
  uint64_t count() const { return count_; }
  uint8_t* data() { return bytes_.data() + size(offset_); }
  const uint8_t* data() const { return bytes_.data() + size(offset_); }

  uint32_t bits(uint64_t i) const {
    uint32_t value = 0;
    std::memcpy(&value, data() + size(i), dataTypeBytes(type_));
    return value;
  }
  void setBits(uint64_t i, uint32_t value) { std::memcpy(data() + size(i), &value, dataTypeBytes(type_)); }
  float value(uint64_t i) const {
    if (type_ == DataType::kFp32) return std::bit_cast<float>(bits(i));
    const auto narrow = static_cast<uint16_t>(bits(i));
    return type_ == DataType::kBf16 ? bf16ToFloat(narrow) : fp16ToFloat(narrow);
  }
  void set(uint64_t i, float value) {
    setBits(i, type_ == DataType::kFp32   ? std::bit_cast<uint32_t>(value)
               : type_ == DataType::kBf16 ? floatToBf16(value)
                                          : floatToFp16(value));
  }
  bool finite(uint64_t i) const { return (std::bit_cast<uint32_t>(value(i)) & 0x7f800000u) != 0x7f800000u; }

  // False if anything before or behind the elements was written.
  bool intact() const {
    for (uint64_t i = 0; i < size(offset_); ++i) {
      if (bytes_[i] != kFill) return false;
    }
    for (uint64_t i = bytes_.size() - kGuard; i < bytes_.size(); ++i) {
      if (bytes_[i] != kFill) return false;
    }
    return true;
  }
  bool operator==(const Elements& other) const {
    return std::memcmp(data(), other.data(), size(count_)) == 0;
  }

 private:
  static constexpr uint64_t kGuard = 64;
  static constexpr uint8_t kFill = 0xa5;
  uint64_t size(uint64_t elements) const { return elements * dataTypeBytes(type_); }

  DataType type_;
  uint64_t count_;
  uint64_t offset_;
  std::vector<uint8_t> bytes_;
};

using Packet = std::vector<uint8_t>;  // operator new aligns to kPacketAlignment

inline QuantizeJob quantizeJob(const WireFormat& format, const Elements& in, Packet& out,
                               Factor factor = {}) {
  out.assign(packetBytes(format, in.count()), 0x5a);
  return {format,     in.type(),  1,          in.data(),  in.count(),
          in.count(), in.count(), out.data(), out.size(), factor};
}

inline DequantizeJob dequantizeJob(const WireFormat& format, const Packet& in, Elements& out) {
  return {format, out.type(), 1, in.data(), in.size(), out.count(), out.data(), out.count(), out.count()};
}

inline Packet quantized(const WireFormat& format, const Elements& in, Factor factor = {}) {
  Packet packet;
  reference::quantize(quantizeJob(format, in, packet, factor));
  return packet;
}

inline Elements dequantized(const WireFormat& format, const Packet& packet, DataType type, uint64_t count) {
  Elements out(type, count);
  reference::dequantize(dequantizeJob(format, packet, out));
  return out;
}

// Packets of equal size one behind the other, as the reducer takes them.
inline ReduceJob reduceJob(const WireFormat& format, DataType type, uint64_t elements, const Packet& packets,
                           uint32_t count, float average, bool to_packet, void* out) {
  ReduceJob job;
  job.format = format;
  job.type = type;
  job.to_packet = to_packet;
  job.packets = count;
  job.in = packets.data();
  job.in_pitch = packetBytes(format, elements);
  job.average = average;
  job.elements = elements;
  job.out = out;
  return job;
}

// One input and where it comes from.
struct Input {
  std::string name;
  Elements elements;
};

// Inputs that together hold every value of the 16-bit types in blocks of every make, and for fp32 a sample.
inline std::vector<Input> everyInput(DataType type, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<uint32_t> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = type == DataType::kFp32 ? random() : i;

  const auto make = [&](const std::string& name, const std::vector<uint32_t>& bits) {
    Input input{name, Elements(type, bits.size())};
    for (uint64_t i = 0; i < bits.size(); ++i) input.elements.setBits(i, bits[i]);
    return input;
  };
  const auto magnitude = [&](uint32_t bits) {
    return type == DataType::kFp32 ? bits & 0x7fffffffu : (bits & 0x7fffu) << 16;
  };
  const uint32_t infinity = type == DataType::kBf16   ? 0x7f80u << 16
                            : type == DataType::kFp16 ? 0x7c00u << 16
                                                      : 0x7f800000u;
  const uint32_t largest = type == DataType::kBf16 ? 0x7f7f : type == DataType::kFp16 ? 0x7bff : 0x7f7fffff;

  std::vector<uint32_t> ordered = all;
  std::sort(ordered.begin(), ordered.end(), [&](uint32_t a, uint32_t b) {
    return magnitude(a) != magnitude(b) ? magnitude(a) < magnitude(b) : a < b;
  });
  std::vector<uint32_t> shuffled = all;
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  std::vector<uint32_t> finite, beside_huge, beside_tiny, normal;
  for (uint32_t bits : shuffled) {
    if (magnitude(bits) < infinity) finite.push_back(bits);
  }
  for (uint64_t i = 0; i < ordered.size(); ++i) {
    if (i % 31 == 0) {
      beside_huge.push_back(i % 2 == 0 ? largest
                                       : largest | (type == DataType::kFp32 ? 0x80000000u : 0x8000u));
      beside_tiny.push_back(1);
    }
    if (magnitude(ordered[i]) < infinity) beside_huge.push_back(ordered[i]);
    beside_tiny.push_back(ordered[i]);
  }
  std::normal_distribution<float> gauss;
  Elements values(type, 16384);
  for (uint64_t i = 0; i < values.count(); ++i) values.set(i, gauss(random) * 0.01f);
  std::vector<Input> inputs{make("ordered", ordered),         make("shuffled", shuffled),
                            make("finite", finite),           make("beside huge", beside_huge),
                            make("beside tiny", beside_tiny), {"normal", values}};
  // Zeros of both signs, whole blocks of them; then 1e-45 alone in a block.
  Elements zeros(type, 2048);
  for (uint64_t i = 0; i < zeros.count(); ++i) zeros.set(i, random() & 1 ? 0.0f : -0.0f);
  inputs.push_back({"zeros", zeros});
  for (uint64_t i = 0; i < zeros.count(); i += 293) zeros.setBits(i, 1);
  inputs.push_back({"smallest", zeros});
  return inputs;
}

// Sets the caller's rounding and flush mode for a scope, and says at the end whether it was kept.
class CallerMode {
 public:
  explicit CallerMode(uint32_t mode) : saved_(_mm_getcsr()), mode_(mode) { _mm_setcsr(mode); }
  ~CallerMode() { _mm_setcsr(saved_); }
  bool kept() const { return _mm_getcsr() == mode_; }

 private:
  uint32_t saved_;
  uint32_t mode_;
};

inline constexpr uint32_t kCallerModes[] = {
    0x1f80,                    // the default
    0x1f80 | 0x8040,           // FTZ and DAZ
    0x1f80 | 0x4000,           // round up
    0x1f80 | 0x6000 | 0x8040,  // towards zero, FTZ and DAZ
    0x1f80 | 0x2000 | 0x003f,  // round down, all exception flags raised
};

}  // namespace halfwire::test
