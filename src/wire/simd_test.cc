// The SIMD code equals the reference bit for bit, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <random>

#include "wire/simd_compare.h"

namespace halfwire::test {
namespace {

TEST(Simd, SomeTargetIsSupported) {
  std::string names;
  for (const SimdTarget& target : simdTargets()) names += std::string(target.name) + " ";
  RecordProperty("targets", names);
  EXPECT_STREQ(host::simdTarget(), simdTargets().empty() ? "scalar" : simdTargets().front().name);
  if (simdTargets().empty()) GTEST_SKIP() << "this processor has none of the instruction sets";
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
        if (format.block % 96 != 32) continue;  // 32 and 128
        ASSERT_NO_FATAL_FAILURE(expectSameElements(format, quantized(format, input.elements), type,
                                                   input.elements.count(), 0, input.name));
      }
    }
  }
}

TEST(Simd, Reduces) {
  std::mt19937 random(5);
  for (DataType type : kTypes) {
    const std::vector<Input> inputs = everyInput(type);
    for (const WireFormat& format : allFormats()) {
      for (uint32_t ranks : {1u, 2u, 3u, 8u, 16u, 17u, 33u}) {
        const uint64_t count = 1 + random() % 6000;
        const Packet packets = randomPackets(format, type, inputs, count, ranks, random);
        const auto own = static_cast<int32_t>(random() % (ranks + 1)) - 1;
        const float average = random() % 2 == 0 ? 1.0f : 1.0f / static_cast<float>(ranks);
        ASSERT_NO_FATAL_FAILURE(expectSameSums(format, type, count, packets, ranks, average, own, "reduce"));
      }
    }
  }
}

TEST(Simd, LengthsAndAlignments) {
  std::mt19937 random(6);
  for (DataType type : kTypes) {
    const Elements values = everyInput(type)[2].elements;  // finite, all magnitudes
    for (const WireFormat& format : allFormats()) {
      for (uint64_t count = 1; count <= 2u * format.block + 1; count += format.block > 64 ? 7 : 1) {
        const uint64_t offset = random() % 33;
        Elements in(type, count, offset);
        const uint64_t start = random() % (values.count() - count);
        for (uint64_t i = 0; i < count; ++i) in.setBits(i, values.bits(start + i));
        ASSERT_NO_FATAL_FAILURE(expectSamePackets(format, in, {}, "length"));
        ASSERT_NO_FATAL_FAILURE(
            expectSameElements(format, quantized(format, in), type, count, offset, "length"));
      }
    }
  }
}

TEST(Simd, Factors) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      const WireFormat format{ElementFormat::kE4M3, ScaleFormat::kFp32, 128};
      for (float factor : {0.3f, -2.0f, 0.0f, infinity, std::nanf(""), 1e-40f}) {
        ASSERT_NO_FATAL_FAILURE(
            expectSamePackets(format, input.elements, {nullptr, factor, true}, input.name));
      }
    }
  }
}

TEST(Simd, AnyBytesOfAPeer) {
  std::mt19937 random(8);
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      for (bool any_scale : {false, true}) {
        const uint64_t count = 5000;
        const Packet packets = hostilePackets(format, count, 2, any_scale, random);
        ASSERT_NO_FATAL_FAILURE(expectSameElements(format, packets, type, count, 0, "hostile"));
        ASSERT_NO_FATAL_FAILURE(expectSameSums(format, type, count, packets, 2, 0.5f, -1, "hostile"));
      }
    }
  }
}

// What programs call, whatever mode their thread is in.
TEST(Host, CallersModeChangesNothingAndIsKept) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      const Elements& in = input.elements;
      for (const WireFormat& format : allFormats()) {
        if (format.block != 128) continue;
        const Packet packet = quantized(format, in);
        const Elements out = dequantized(format, packet, type, in.count());
        Packet sum(packet.size());
        reference::reduce(reduceJob(format, type, in.count(), packet, 1, 1.0f / 3, true, sum.data()));
        for (uint32_t mode : kCallerModes) {
          Packet packet2, sum2(packet.size());
          Elements out2(type, in.count());
          const QuantizeJob quantize = quantizeJob(format, in, packet2);
          const DequantizeJob dequantize = dequantizeJob(format, packet, out2);
          const ReduceJob reduce =
              reduceJob(format, type, in.count(), packet, 1, 1.0f / 3, true, sum2.data());
          {
            const CallerMode caller(mode);
            host::quantize(quantize);
            host::dequantize(dequantize);
            host::reduce(reduce);
            EXPECT_TRUE(caller.kept());
          }
          ASSERT_TRUE(packet == packet2 && out == out2 && sum == sum2)
              << name(format) << " " << name(type) << " " << input.name << " mode " << mode;
        }
      }
    }
  }
}

}  // namespace
}  // namespace halfwire::test
