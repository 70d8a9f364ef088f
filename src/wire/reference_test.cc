// The reference against an oracle that works from the definitions by search.
#include <gtest/gtest.h>

#include <random>

#include "wire/oracle.h"
#include "wire/test_support.h"

namespace halfwire::test {
namespace {

constexpr DataType kF32 = DataType::kFp32;

// Some elements of a long input, in runs that keep their neighbours together.
Elements sample(const Elements& in, uint64_t run, uint64_t every) {
  std::vector<uint32_t> bits;
  for (uint64_t i = 0; i < in.count(); i += every) {
    for (uint64_t j = i; j < std::min(in.count(), i + run); ++j) bits.push_back(in.bits(j));
  }
  Elements out(in.type(), bits.size());
  for (uint64_t i = 0; i < bits.size(); ++i) out.setBits(i, bits[i]);
  return out;
}

void expectOracle(const WireFormat& format, const Elements& in, Factor factor, const std::string& what) {
  const Packet expected = oracle::quantize(format, in, factor.present ? &factor.value : nullptr);
  const Packet got = quantized(format, in, factor);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], expected[i]) << what << " " << name(format) << " " << name(in.type()) << " byte " << i
                                   << " of " << in.count() << " elements, factor " << factor.value;
  }
}

TEST(Reference, QuantizesLikeTheOracle) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      for (const WireFormat& format : allFormats()) {
        const bool full = format.block == 128 && (input.name == "ordered" || input.name == "beside tiny");
        ASSERT_NO_FATAL_FAILURE(
            expectOracle(format, full ? input.elements : sample(input.elements, 300, 6000), {}, input.name));
      }
    }
  }
}

TEST(Reference, FactorsLikeTheOracle) {
  std::vector<float> factors{0.125f, -3.0f, 0.3f, 0.0f, -0.0f, 1e30f, 1e-30f, 1e-45f, 3.4e38f};
  factors.push_back(std::numeric_limits<float>::infinity());
  factors.push_back(std::numeric_limits<float>::quiet_NaN());
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      const Elements in = sample(input.elements, 300, 20000);
      for (float factor : factors) {
        for (const WireFormat& format : allFormats()) {
          if (format.block != 128) continue;
          ASSERT_NO_FATAL_FAILURE(expectOracle(format, in, {nullptr, factor, true}, input.name));
        }
      }
    }
  }
}

TEST(Reference, FactorIsReadInTheJobsType) {
  const uint16_t bf16 = 0xc040, fp16 = 0xc200;  // -3
  const float fp32 = -3.0f;
  for (DataType type : kTypes) {
    const void* where = type == DataType::kBf16   ? static_cast<const void*>(&bf16)
                        : type == DataType::kFp16 ? static_cast<const void*>(&fp16)
                                                  : &fp32;
    Elements in(type, 300);
    for (uint64_t i = 0; i < in.count(); ++i) in.set(i, 0.25f * static_cast<float>(i) - 20.0f);
    const WireFormat format;
    EXPECT_EQ(quantized(format, in, {where, 99.0f, true}), quantized(format, in, {nullptr, -3.0f, true}));
    EXPECT_EQ(quantized(format, in, {where, 99.0f, false}), quantized(format, in));
  }
}

// Codes and the middles between them, and their neighbours in fp32, under a scale of exactly one.
TEST(Reference, EveryCodeAndEveryMiddle) {
  for (const WireFormat& format : allFormats()) {
    if (format.block != 32) continue;
    const float top = elementMax(format.element);
    std::vector<float> values;
    for (uint32_t code = 0; code < 128; ++code) {
      const auto value = static_cast<float>(oracle::decode(format.element, static_cast<uint8_t>(code)));
      const auto next = static_cast<float>(oracle::decode(format.element, static_cast<uint8_t>(code + 1)));
      for (float v : {value, (value + next) / 2}) {
        if (!(v <= top)) continue;
        for (float w : {std::nextafter(v, 0.0f), v, std::nextafter(v, top)})
          values.insert(values.end(), {w, -w});
      }
    }
    Elements in(kF32, 0);
    std::vector<float> blocks;
    for (float v : values) {
      if (blocks.size() % 32 == 0) blocks.push_back(top);
      blocks.push_back(v);
    }
    in = Elements(kF32, blocks.size());
    for (uint64_t i = 0; i < blocks.size(); ++i) in.set(i, blocks[i]);
    ASSERT_NO_FATAL_FAILURE(expectOracle(format, in, {}, "middles"));
    // The codes themselves survive.
    const Elements out = dequantized(format, quantized(format, in), kF32, in.count());
    for (uint64_t i = 0; i < in.count(); ++i) {
      const oracle::Real exact = oracle::decode(format.element, oracle::encode(format.element, in.value(i)));
      EXPECT_EQ(out.value(i), exact) << name(format) << " " << in.value(i);
    }
  }
}

TEST(Reference, DequantizesLikeTheOracle) {
  std::mt19937 random(3);
  for (DataType type : kTypes) {
    for (const WireFormat& format : allFormats()) {
      // Every code under scales across their whole range, also where products must be clamped or are
      // subnormal.
      const uint64_t n = 256 * 40;
      Packet packet(packetBytes(format, n));
      for (uint64_t i = 0; i < n; ++i) packet[i] = static_cast<uint8_t>(i);
      for (uint64_t b = 0; b < blockCount(format, n); ++b) {
        uint8_t* const scale = packet.data() + scaleOffset(format, n) + b * scaleBytes(format.scale);
        const uint32_t exponent = 1 + random() % 254;
        if (format.scale == ScaleFormat::kE8M0) {
          *scale = static_cast<uint8_t>(exponent);
        } else {
          const uint32_t bits = exponent << 23 | random() >> 9;
          std::memcpy(scale, &bits, 4);
        }
      }
      const Elements expected = oracle::dequantize(format, packet, type, n);
      const Elements got = dequantized(format, packet, type, n);
      for (uint64_t i = 0; i < n; ++i) {
        ASSERT_EQ(got.bits(i), expected.bits(i)) << name(format) << " " << name(type) << " element " << i;
      }
    }
  }
}

TEST(Reference, ReducesLikeTheOracle) {
  std::mt19937 random(4);
  for (DataType type : kTypes) {
    const std::vector<Input> inputs = everyInput(type);
    for (const WireFormat& format : allFormats()) {
      if (format.block == 64) continue;
      const uint32_t ranks = 1 + random() % 5;
      const uint64_t n = 700 + random() % 300;
      Packet packets;
      for (uint32_t k = 0; k < ranks; ++k) {
        const Elements& all = inputs[random() % inputs.size()].elements;
        Elements part(type, n);
        const uint64_t start = random() % (all.count() - n);
        for (uint64_t i = 0; i < n; ++i) part.setBits(i, all.bits(start + i));
        const Packet packet = quantized(format, part);
        packets.insert(packets.end(), packet.begin(), packet.end());
      }
      for (float average : {1.0f, 1.0f / static_cast<float>(ranks)}) {
        Elements out(type, n);
        const ReduceJob job = reduceJob(format, type, n, packets, ranks, average, false, out.data());
        reference::reduce(job);
        const std::vector<oracle::Real> sums = oracle::sums(job);
        for (uint64_t i = 0; i < n; ++i) {
          ASSERT_EQ(out.bits(i), oracle::bitsOf(type, oracle::toType(type, sums[i])))
              << name(format) << " " << name(type) << " ranks " << ranks << " element " << i;
        }
        Packet got(packetBytes(format, n), 0x5a), expected(got.size());
        reference::reduce(reduceJob(format, type, n, packets, ranks, average, true, got.data()));
        for (uint64_t b = 0; b < blockCount(format, n); ++b) {
          const uint64_t start = b * format.block;
          oracle::quantizeBlock(
              format, type,
              {sums.begin() + static_cast<ptrdiff_t>(start),
               sums.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(n, start + format.block))},
              expected.data() + start,
              expected.data() + scaleOffset(format, n) + b * scaleBytes(format.scale));
        }
        ASSERT_EQ(got, expected) << name(format) << " " << name(type) << " ranks " << ranks;
      }
    }
  }
}

TEST(Reference, CallersModeChangesNothingAndIsKept) {
  for (DataType type : kTypes) {
    for (const Input& input : everyInput(type)) {
      const Elements in = sample(input.elements, 300, 9000);
      for (const WireFormat& format : allFormats()) {
        if (format.block != 128) continue;
        const Factor factor{nullptr, 0.3f, true};
        const Packet packet = quantized(format, in, factor);
        const Elements out = dequantized(format, packet, type, in.count());
        Packet sum(packet.size());
        reference::reduce(reduceJob(format, type, in.count(), packet, 1, 1.0f / 3, true, sum.data()));
        for (uint32_t mode : kCallerModes) {
          Packet packet2, sum2(packet.size());
          Elements out2(type, in.count());
          const QuantizeJob quantize = quantizeJob(format, in, packet2, factor);
          const DequantizeJob dequantize = dequantizeJob(format, packet, out2);
          const ReduceJob reduce =
              reduceJob(format, type, in.count(), packet, 1, 1.0f / 3, true, sum2.data());
          {
            const CallerMode caller(mode);
            reference::quantize(quantize);
            reference::dequantize(dequantize);
            reference::reduce(reduce);
            EXPECT_TRUE(caller.kept());
          }
          ASSERT_TRUE(packet == packet2 && out == out2 && sum == sum2)
              << name(format) << " " << name(type) << " " << input.name << " mode " << mode;
        }
      }
    }
  }
}

// Largest exponent bytes, as docs/wire-format.md gives them.
TEST(Reference, LargestScaleExponents) {
  Elements in(kF32, 1);
  in.setBits(0, 0x7f7fffff);
  const auto exponent = [&](ElementFormat element) {
    return quantized({element, ScaleFormat::kE8M0, 32}, in)[scaleOffset({}, 1)];
  };
  EXPECT_EQ(exponent(ElementFormat::kE4M3), 247);
  EXPECT_EQ(exponent(ElementFormat::kE5M2), 240);
  EXPECT_EQ(exponent(ElementFormat::kInt8), 249);
  EXPECT_EQ(exponent(ElementFormat::kE3M4), 251);
}

}  // namespace
}  // namespace halfwire::test
