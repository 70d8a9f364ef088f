// The long comparisons of SIMD code and reference: every input with every factor, several seeds, random
// lengths.
#include <gtest/gtest.h>

#include <random>

#include "wire/simd_compare.h"

namespace halfwire::test {
namespace {

TEST(SimdFull, EveryInputWithEveryFactor) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type, 11)) {
      for (const WireFormat& format : allFormats()) {
        for (float factor : {0.3f, -1.0f, -0.0f, infinity, std::nanf(""), 1e30f, 1e-30f, 1e-45f}) {
          ASSERT_NO_FATAL_FAILURE(
              expectSamePackets(format, input.elements, {nullptr, factor, true}, input.name));
        }
      }
    }
  }
}

TEST(SimdFull, RandomBitsOfFp32) {
  for (uint32_t seed = 100; seed < 110; ++seed) {
    for (const Input& input : everyInput(DataType::kFp32, seed)) {
      for (const WireFormat& format : allFormats()) {
        ASSERT_NO_FATAL_FAILURE(expectSamePackets(format, input.elements, {}, input.name));
        ASSERT_NO_FATAL_FAILURE(expectSameElements(format, quantized(format, input.elements), DataType::kFp32,
                                                   input.elements.count(), 3, input.name));
      }
    }
  }
}

TEST(SimdFull, EveryInputDequantizes) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type, 12)) {
      for (const WireFormat& format : allFormats()) {
        const Packet packet = quantized(format, input.elements);
        for (DataType out : kTypes)
          ASSERT_NO_FATAL_FAILURE(
              expectSameElements(format, packet, out, input.elements.count(), 1, input.name));
      }
    }
  }
}

TEST(SimdFull, EveryLengthAtEveryAlignment) {
  std::mt19937 random(13);
  for (DataType type : kTypes) {
    const Elements values = everyInput(type)[2].elements;
    for (const WireFormat& format : allFormats()) {
      if (format.block > 128) continue;
      for (uint64_t count = 1; count <= format.block + 1u; ++count) {
        for (uint64_t offset = 0; offset < 64 / dataTypeBytes(type); offset += 1 + random() % 3) {
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
}

TEST(SimdFull, RandomReductions) {
  std::mt19937 random(14);
  for (int round = 0; round < 12; ++round) {
    for (DataType type : kTypes) {
      const std::vector<Input> inputs = everyInput(type, random());
      for (const WireFormat& format : allFormats()) {
        const uint32_t ranks = 1 + random() % 40;
        const uint64_t count = 1 + random() % 9000;
        const Packet packets = randomPackets(format, type, inputs, count, ranks, random);
        ASSERT_NO_FATAL_FAILURE(expectSameSums(format, type, count, packets, ranks,
                                               1.0f / static_cast<float>(1 + random() % 40),
                                               static_cast<int32_t>(random() % (ranks + 1)) - 1, "reduce"));
      }
    }
  }
}

TEST(SimdFull, AnyBytesOfAPeer) {
  std::mt19937 random(15);
  for (int round = 0; round < 10; ++round) {
    for (const WireFormat& format : allFormats()) {
      for (DataType type : kTypes) {
        const uint64_t count = 1 + random() % 20000;
        const uint32_t ranks = 1 + random() % 5;
        const Packet packets = hostilePackets(format, count, ranks, random() % 2 == 0, random);
        ASSERT_NO_FATAL_FAILURE(expectSameElements(format, packets, type, count, random() % 9, "hostile"));
        ASSERT_NO_FATAL_FAILURE(expectSameSums(format, type, count, packets, ranks,
                                               1.0f / static_cast<float>(ranks), -1, "hostile"));
      }
    }
  }
}

}  // namespace
}  // namespace halfwire::test
