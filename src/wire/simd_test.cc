// The SIMD code equals the reference bit for bit, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "wire/test_support.h"

namespace halfwire::test {
namespace {

// The first byte that differs, for the message of a failure.
size_t firstDifference(const Packet& a, const Packet& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

void expectSamePackets(const WireFormat& format, const Elements& in, Factor factor, const std::string& what) {
  const Packet expected = quantized(format, in, factor);
  for (const Implementation& implementation : simdImplementations()) {
    Packet got;
    implementation.run(quantizeJob(format, in, got, factor));
    ASSERT_TRUE(got == expected) << what << " " << name(format) << " " << name(in.type()) << " "
                                 << implementation.name() << " byte " << firstDifference(expected, got)
                                 << " of " << in.count();
  }
}

void expectSameElements(const WireFormat& format, const Packet& packet, DataType type, uint64_t count,
                        uint64_t offset, const std::string& what) {
  const Elements expected = dequantized(format, packet, type, count);
  for (const Implementation& implementation : simdImplementations()) {
    Elements got(type, count, offset);
    implementation.run(dequantizeJob(format, packet, got));
    ASSERT_TRUE(got.intact()) << what << " " << name(format) << " " << implementation.name();
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(got.bits(i), expected.bits(i))
          << what << " " << name(format) << " " << name(type) << " " << implementation.name() << " element "
          << i << " of " << count;
    }
  }
}

TEST(Simd, SomeTargetIsSupported) {
  for (const SimdTarget& target : simdTargets()) RecordProperty("target", target.name);
  EXPECT_FALSE(simdTargets().empty());
  EXPECT_STREQ(host::simdTarget(), simdTargets().empty() ? "scalar" : simdTargets().front().name);
}

TEST(Simd, QuantizesEveryInput) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      for (const WireFormat& format : allFormats()) expectSamePackets(format, input.elements, {}, input.name);
    }
  }
}

TEST(Simd, DequantizesEveryInput) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      for (const WireFormat& format : allFormats()) {
        if (format.block == 64) continue;
        expectSameElements(format, quantized(format, input.elements), type, input.elements.count(), 0,
                           input.name);
      }
    }
  }
}

}  // namespace
}  // namespace halfwire::test
