// Bad numbers stay visible and good ones stay good, from quantizing on each rank to the result.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "wire/test_support.h"

namespace halfwire::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// What every rank of a sum ends up with: by packet (AllReduce) and in elements (ReduceScatter).
struct Outcome {
  Elements by_packet;
  Elements in_elements;
};

Outcome sum(const WireFormat& format, const std::vector<Elements>& ranks, bool average) {
  const DataType type = ranks.front().type();
  const uint64_t n = ranks.front().count();
  Packet packets;
  for (const Elements& rank : ranks) {
    Packet packet;
    host::quantize(quantizeJob(format, rank, packet));
    packets.insert(packets.end(), packet.begin(), packet.end());
  }
  const auto count = static_cast<uint32_t>(ranks.size());
  const float a = average ? 1.0f / static_cast<float>(count) : 1.0f;
  Packet reduced(packetBytes(format, n));
  host::reduce(reduceJob(format, type, n, packets, count, a, true, reduced.data()));
  Outcome outcome{Elements(type, n), Elements(type, n)};
  host::dequantize(dequantizeJob(format, reduced, outcome.by_packet));
  host::reduce(reduceJob(format, type, n, packets, count, a, false, outcome.in_elements.data()));
  return outcome;
}

uint32_t largestBits(DataType type) {
  return type == DataType::kBf16 ? 0x7f7f : type == DataType::kFp16 ? 0x7bff : 0x7f7fffff;
}

TEST(NonFinite, ComesOutWhereItWentInAndNowhereElse) {
  std::mt19937 random(21);
  std::normal_distribution<float> gauss;
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      for (uint32_t ranks : {1u, 2u, 3u, 8u}) {
        const uint64_t n = 700 + random() % 100;
        std::vector<Elements> in(ranks, Elements(type, n));
        std::vector<bool> bad(n);
        for (Elements& rank : in) {
          for (uint64_t i = 0; i < n; ++i) rank.set(i, gauss(random) * 100);
          for (int k = 0; k < 4; ++k) {
            const uint64_t i = random() % n;
            bad[i] = true;
            // A NaN with a payload, or an infinity, of either sign.
            const uint32_t infinity = type == DataType::kFp32   ? 0x7f800000
                                      : type == DataType::kBf16 ? 0x7f80
                                                                : 0x7c00;
            const uint32_t payload = random() % 2 == 0 ? 0 : 1 + random() % 100;
            const uint32_t sign = (random() % 2) << (8 * dataTypeBytes(type) - 1);
            rank.setBits(i, sign | infinity | payload);
          }
        }
        for (bool average : {false, true}) {
          const Outcome out = sum(format, in, average);
          for (uint64_t i = 0; i < n; ++i) {
            ASSERT_EQ(out.by_packet.finite(i), !bad[i])
                << name(format) << " " << name(type) << " element " << i;
            ASSERT_EQ(out.in_elements.finite(i), !bad[i])
                << name(format) << " " << name(type) << " element " << i;
          }
        }
      }
    }
  }
}

TEST(NonFinite, InfinitiesOfBothSignsDoNotCancel) {
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      std::vector<Elements> in(2, Elements(type, 40));
      for (uint64_t i = 0; i < 40; ++i) {
        in[0].set(i, 1.0f);
        in[1].set(i, 1.0f);
      }
      in[0].set(7, kInf);
      in[1].set(7, -kInf);
      in[0].set(9, kInf);
      const Outcome out = sum(format, in, false);
      for (uint64_t i = 0; i < 40; ++i) {
        EXPECT_EQ(out.by_packet.finite(i), i != 7 && i != 9) << name(format) << " " << name(type) << " " << i;
        EXPECT_EQ(out.in_elements.finite(i), i != 7 && i != 9)
            << name(format) << " " << name(type) << " " << i;
      }
    }
  }
}

// A loss scaler must see the overflow of fp16, as it would with NCCL, and its neighbours must not suffer.
TEST(NonFinite, SumThatFp16CannotHoldIsVisible) {
  for (const WireFormat& format : allFormats()) {
    for (float sign : {1.0f, -1.0f}) {
      std::vector<Elements> in(2, Elements(DataType::kFp16, 300));
      for (Elements& rank : in) {
        for (uint64_t i = 0; i < 300; ++i) rank.set(i, 8.0f);
        rank.set(200, sign * 60000);
      }
      const Outcome total = sum(format, in, false);
      const Outcome mean = sum(format, in, true);
      for (uint64_t i = 0; i < 300; ++i) {
        EXPECT_EQ(total.by_packet.finite(i), i != 200) << name(format) << " " << i;
        EXPECT_EQ(total.in_elements.finite(i), i != 200) << name(format) << " " << i;
        EXPECT_TRUE(mean.by_packet.finite(i) && mean.in_elements.finite(i)) << name(format) << " " << i;
      }
      EXPECT_NEAR(mean.by_packet.value(200), sign * 60000, 0.13 * 60000) << name(format);
      EXPECT_EQ(total.by_packet.value(299), 16.0f) << name(format);
    }
  }
}

TEST(NonFinite, LargestValuesStayFinite) {
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      Elements in(type, 300);
      const uint32_t top = largestBits(type);
      const uint32_t sign = 1u << (8 * dataTypeBytes(type) - 1);
      // The largest values themselves, and those just below, which round up to them.
      for (uint64_t i = 0; i < 300; ++i)
        in.setBits(i, (top - static_cast<uint32_t>(i % 64)) | (i % 2 == 0 ? 0 : sign));
      Packet packet;
      host::quantize(quantizeJob(format, in, packet));
      Elements out(type, 300);
      host::dequantize(dequantizeJob(format, packet, out));
      for (uint64_t i = 0; i < 300; ++i) {
        ASSERT_TRUE(out.finite(i)) << name(format) << " " << name(type) << " " << i;
        ASSERT_NEAR(out.value(i) / in.value(i), 1.0, 0.13) << name(format) << " " << name(type) << " " << i;
      }
      // The average of many of them, and the sum of one with zeros.
      for (uint32_t ranks : {2u, 3u, 5u, 7u, 8u, 16u, 61u}) {
        const Outcome mean = sum(format, std::vector<Elements>(ranks, in), true);
        std::vector<Elements> one(ranks, Elements(type, 300));
        for (Elements& rank : one) {
          for (uint64_t i = 0; i < 300; ++i) rank.setBits(i, 0);
        }
        one[ranks / 2] = in;
        const Outcome total = sum(format, one, false);
        for (uint64_t i = 0; i < 300; ++i) {
          ASSERT_TRUE(mean.by_packet.finite(i))
              << name(format) << " " << name(type) << " " << ranks << " " << i;
          ASSERT_TRUE(mean.in_elements.finite(i))
              << name(format) << " " << name(type) << " " << ranks << " " << i;
          ASSERT_TRUE(total.by_packet.finite(i))
              << name(format) << " " << name(type) << " " << ranks << " " << i;
          ASSERT_TRUE(total.in_elements.finite(i))
              << name(format) << " " << name(type) << " " << ranks << " " << i;
        }
      }
      // The sum of two is not.
      const Outcome two = sum(format, {in, in}, false);
      for (uint64_t i = 0; i < 300; ++i) {
        ASSERT_FALSE(two.by_packet.finite(i)) << name(format) << " " << name(type) << " " << i;
        ASSERT_FALSE(two.in_elements.finite(i)) << name(format) << " " << name(type) << " " << i;
      }
    }
  }
}

// RN(1 / W) * W can exceed 1; in fp32 that leaves room above the largest value of a 16-bit type.
TEST(NonFinite, AveragesOfTheLargestValueAreFinite) {
  for (const WireFormat& format : allFormats()) {
    if (format.block != 32) continue;
    for (DataType type : {DataType::kBf16, DataType::kFp16}) {
      Elements in(type, 32), out(type, 32);
      for (uint64_t i = 0; i < 32; ++i) in.setBits(i, largestBits(type));
      const Packet packet = quantized(format, in);
      for (uint32_t ranks = 1; ranks <= 600; ++ranks) {
        ReduceJob job =
            reduceJob(format, type, 32, packet, ranks, 1.0f / static_cast<float>(ranks), false, out.data());
        job.in_pitch = 0;  // the same packet from every rank
        host::reduce(job);
        for (uint64_t i = 0; i < 32; ++i)
          ASSERT_TRUE(out.finite(i)) << name(format) << " " << name(type) << " " << ranks;
      }
    }
  }
}

// Sums that T holds with room for the format's rounding error are finite, whatever the magnitudes.
TEST(NonFinite, FiniteSumsStayFinite) {
  std::mt19937 random(22);
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      for (uint32_t ranks : {2u, 8u}) {
        const uint32_t room = type == DataType::kFp32   ? 4u << 23
                              : type == DataType::kBf16 ? 4u << 7
                                                        : 4u << 10;
        std::vector<Elements> in(ranks, Elements(type, 600));
        for (Elements& rank : in) {
          for (uint64_t i = 0; i < 600; ++i) {
            const uint32_t sign = (random() % 2) << (8 * dataTypeBytes(type) - 1);
            rank.setBits(i, random() % (largestBits(type) - room) | sign);
          }
        }
        const Outcome out = sum(format, in, false);
        for (uint64_t i = 0; i < 600; ++i) {
          ASSERT_TRUE(out.by_packet.finite(i)) << name(format) << " " << name(type) << " " << i;
          ASSERT_TRUE(out.in_elements.finite(i)) << name(format) << " " << name(type) << " " << i;
        }
      }
    }
  }
}

TEST(NonFinite, TinyBlocksFlushToSignedZero) {
  for (const WireFormat& format : allFormats()) {
    for (DataType type : {DataType::kBf16, DataType::kFp32}) {
      Elements in(type, 256);
      const uint32_t sign = 1u << (8 * dataTypeBytes(type) - 1);
      for (uint64_t i = 0; i < 256; ++i) in.setBits(i, (i % 3 == 0 ? 0u : 1u) | (i % 2 == 0 ? 0u : sign));
      const Elements out = dequantized(format, quantized(format, in), type, 256);
      for (uint64_t i = 0; i < 256; ++i) {
        const bool negative = i % 2 == 1 && format.element != ElementFormat::kInt8;
        // fp32's 1e-45 is far below the smallest code under the smallest scale; bf16's smallest number,
        // 2^-133, is not in E4M3 (2^-135) and E5M2 (2^-142); in E3M4 (2^-132) it is half of it.
        const bool fine = format.element == ElementFormat::kE4M3 || format.element == ElementFormat::kE5M2;
        const bool kept = type == DataType::kBf16 && i % 3 != 0 && fine;
        EXPECT_EQ(out.value(i), kept ? in.value(i) : 0.0f) << name(format) << " " << name(type) << " " << i;
        EXPECT_EQ(std::signbit(out.value(i)), negative) << name(format) << " " << name(type) << " " << i;
      }
    }
  }
}

TEST(NonFinite, BlocksWithoutAFiniteValueHaveTheSmallestScale) {
  for (const WireFormat& format : allFormats()) {
    for (DataType type : kTypes) {
      Elements in(type, 512);
      for (uint64_t i = 0; i < 256; ++i) in.set(i, i % 2 == 0 ? kInf : -std::nanf(""));
      for (uint64_t i = 256; i < 512; ++i) in.set(i, i % 2 == 0 ? 0.0f : -0.0f);
      Packet packet;
      host::quantize(quantizeJob(format, in, packet));
      for (uint64_t i = 0; i < 512; ++i) {
        const uint8_t zero = i % 2 == 1 && format.element != ElementFormat::kInt8 ? 0x80 : 0;
        EXPECT_EQ(packet[i], i < 256 ? nonFiniteCode(format.element) : zero) << name(format) << " " << i;
      }
      const uint8_t* const scales = packet.data() + scaleOffset(format, 512);
      for (uint64_t b = 0; b < blockCount(format, 512); ++b) {
        float scale = 0x1p-126f;
        if (format.scale == ScaleFormat::kFp32) std::memcpy(&scale, scales + 4 * b, 4);
        EXPECT_EQ(scale, 0x1p-126f) << name(format);
        EXPECT_TRUE(format.scale == ScaleFormat::kFp32 || scales[b] == 1) << name(format);
      }
      Elements out(type, 512);
      host::dequantize(dequantizeJob(format, packet, out));
      const uint32_t nan = type == DataType::kFp32 ? kCanonicalNan32 : kCanonicalNan16;
      for (uint64_t i = 0; i < 512; ++i) {
        if (i < 256) {
          EXPECT_EQ(out.bits(i), nan) << name(format);
        } else {
          EXPECT_EQ(out.value(i), 0.0f) << name(format);
        }
      }
    }
  }
}

// With power-of-two scales a second pass through the wire changes nothing.
TEST(NonFinite, PowerOfTwoScalesAreIdempotent) {
  for (const WireFormat& format : allFormats()) {
    if (format.scale != ScaleFormat::kE8M0) continue;
    for (DataType type : {DataType::kBf16, DataType::kFp32}) {
      std::mt19937 random(23);
      std::normal_distribution<float> gauss;
      Elements in(type, 5000);
      for (uint64_t i = 0; i < in.count(); ++i) in.set(i, gauss(random) * std::exp(gauss(random) * 5));
      const Elements once = dequantized(format, quantized(format, in), type, in.count());
      const Elements twice = dequantized(format, quantized(format, once), type, in.count());
      EXPECT_TRUE(once == twice) << name(format) << " " << name(type);
    }
  }
}

}  // namespace
}  // namespace halfwire::test
