// Stochastic rounding against its definition, and what follows from it: the mean is the value, and nothing
// but the key and the place in the buffer decides.
#include "wire/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "wire/cuda_arithmetic.h"
#include "wire/oracle.h"
#include "wire/rounded.h"
#include "wire/test_support.h"

namespace halfwire::test {
namespace {

// By search among the codes' values: the upper neighbour for the largest values of `random`, as many as the
// distance says.
uint8_t byDefinition(ElementFormat format, float z, uint32_t random) {
  const std::vector<oracle::Real>& values = oracle::magnitudes(format);
  const oracle::Real magnitude = std::min<oracle::Real>(std::fabs(z), values.back());
  size_t code =
      static_cast<size_t>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin()) - 1;
  if (code + 1 < values.size()) {
    const oracle::Real way = (magnitude - values[code]) / (values[code + 1] - values[code]);
    const auto upper = static_cast<uint64_t>(std::floor(std::ldexp(way, 32)));
    if (uint64_t{random} + upper >= uint64_t{1} << 32) ++code;
  }
  if (!std::signbit(z)) return static_cast<uint8_t>(code);
  return static_cast<uint8_t>(format == ElementFormat::kInt8 ? -static_cast<int>(code)
                                                             : static_cast<int>(code) | 0x80);
}

TEST(Rounding, StochasticCodesAreThoseOfTheDefinition) {
  std::mt19937 random(7);
  for (const ElementFormat format : kElementFormats) {
    const float top = elementMax(format);
    std::vector<float> values = {0.0f,   -0.0f,     top,       -top, std::nextafter(top, 2 * top),
                                 1e-45f, 0x1p-126f, -0x1p-127f};
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (int i = 0; i < 20000; ++i) values.push_back(top * uniform(random));
    for (int i = 0; i < 20000; ++i)
      values.push_back(std::ldexp(uniform(random), static_cast<int>(random() % 60) - 50));
    for (const oracle::Real code : oracle::magnitudes(format)) values.push_back(static_cast<float>(code));
    for (const float z : values) {
      if (std::fabs(z) > std::nextafter(top, 2 * top)) continue;
      for (const uint32_t r : {0u, 0xffffffffu, 0x80000000u, static_cast<uint32_t>(random())}) {
        ASSERT_EQ(stochasticCode(format, std::bit_cast<uint32_t>(z), r), byDefinition(format, z, r))
            << elementFormatName(format) << " " << z << " " << r;
      }
    }
  }
}

TEST(Rounding, CodesOfKernelsAreTheSame) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-30.0f, 30.0f);
  for (uint64_t index = 0; index < 1000; ++index) {
    const float z[4] = {uniform(random), uniform(random), uniform(random), uniform(random)};
    const uint32_t e3m4 = cuda::encodeStochastic4<ElementFormat::kE3M4>(z, 99, index);
    const uint32_t int8 = cuda::encodeStochastic4<ElementFormat::kInt8>(z, 99, index);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t bits = roundingBits(99, index + i);
      EXPECT_EQ(e3m4 >> (8 * i) & 0xff,
                stochasticCode(ElementFormat::kE3M4, std::bit_cast<uint32_t>(z[i]), bits));
      EXPECT_EQ(int8 >> (8 * i) & 0xff,
                stochasticCode(ElementFormat::kInt8, std::bit_cast<uint32_t>(z[i]), bits));
    }
  }
}

// With 4096 keys the mean of a value's roundings lies within five standard errors of it, each at most half
// the way between two codes. Rounding to nearest misses by up to that half.
TEST(Rounding, TheMeanIsTheValue) {
  constexpr int kKeys = 4096;
  for (const ElementFormat element : kElementFormats) {
    const WireFormat format{element, ScaleFormat::kE8M0, 32};
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> in(96);
    for (float& x : in) x = normal(random);
    std::vector<double> mean(in.size()), low(in.size(), 1e9), high(in.size(), -1e9);
    for (int k = 0; k < kKeys; ++k) {
      const std::vector<float> out = rounded(format, in, {true, roundingKey(1, 0, k, 0, 0), 0});
      for (size_t i = 0; i < in.size(); ++i) {
        mean[i] += double{out[i]} / kKeys;
        low[i] = std::min<double>(low[i], out[i]);
        high[i] = std::max<double>(high[i], out[i]);
      }
    }
    for (size_t i = 0; i < in.size(); ++i) {
      EXPECT_LE(low[i], in[i]);
      EXPECT_GE(high[i], in[i]);
      EXPECT_NEAR(mean[i], in[i], 5 * 0.5 * (high[i] - low[i]) / std::sqrt(kKeys) + 1e-6 * std::fabs(in[i]))
          << elementFormatName(element) << " " << i;
    }
  }
}

// Cut in two, the codes are those of the whole: an element's bits follow from its place.
TEST(Rounding, WhereAMessageIsCutChangesNothing) {
  const WireFormat format;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> in(1000);
  for (float& x : in) x = normal(random);
  const Rounding rounding{true, 17, 0};
  const std::vector<float> whole = rounded(format, in, rounding);
  const std::vector<float> first = rounded(format, {in.begin(), in.begin() + 384}, rounding);
  const std::vector<float> second = rounded(format, {in.begin() + 384, in.end()}, {true, 17, 384});
  std::vector<float> both = first;
  both.insert(both.end(), second.begin(), second.end());
  EXPECT_EQ(whole, both);
  EXPECT_NE(whole, rounded(format, in, {true, 18, 0}));
  EXPECT_NE(whole, rounded(format, in, {}));
  // Segments of one job, too: the second begins where the first one's elements end.
  std::vector<uint8_t> packets(2 * packetBytes(format, 512));
  QuantizeJob q{format,         DataType::kFp32,          2,  in.data(), 512, 1000, 512,
                packets.data(), packetBytes(format, 512), {}, rounding};
  host::quantize(q);
  std::vector<float> out(1000);
  host::dequantize(
      {format, DataType::kFp32, 2, packets.data(), packetBytes(format, 512), 512, out.data(), 512, 1000});
  EXPECT_EQ(whole, out);
}

// Bad numbers, zeros and a block's largest element are what they are without it.
TEST(Rounding, BadNumbersAndZerosStay) {
  for (const WireFormat& format : allFormats()) {
    std::vector<float> in(256, 0.0f);
    in[3] = std::numeric_limits<float>::infinity();
    in[7] = std::numeric_limits<float>::quiet_NaN();
    in[9] = -0.0f;
    const std::vector<float> out = rounded(format, in, {true, 4, 0});
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(std::isfinite(out[i]), i != 3 && i != 7);
    EXPECT_EQ(out[0], 0.0f);
  }
}

// A sum that becomes a packet is rounded the same way, in its place.
TEST(Rounding, SumsBecomePacketsWithoutBias) {
  const WireFormat format{ElementFormat::kE4M3, ScaleFormat::kFp32, 32};
  std::vector<float> in(64, 1.0f);
  for (size_t i = 0; i < in.size(); ++i) in[i] = i % 2 == 0 ? 448.0f : 17.0f * static_cast<float>(i % 13);
  std::vector<uint8_t> both(2 * packetBytes(format, 64)), sum(packetBytes(format, 64));
  for (int k = 0; k < 2; ++k) {
    QuantizeJob q{
        format, DataType::kFp32, 1, in.data(), 64, 64, 64, both.data() + k * packetBytes(format, 64), 0, {},
        {}};
    host::quantize(q);
  }
  std::vector<float> rounded(64), exact(64);
  ReduceJob job;
  job.format = format;
  job.type = DataType::kFp32;
  job.packets = 2;
  job.in = both.data();
  job.in_pitch = packetBytes(format, 64);
  job.average = 1.0f / 3;
  job.elements = 64;
  job.to_packet = false;
  job.out = exact.data();
  host::reduce(job);
  job.to_packet = true;
  job.out = sum.data();
  std::vector<double> mean(64);
  for (int k = 0; k < 4096; ++k) {
    job.rounding = {true, roundingKey(2, 0, k, 1, 1), 640};
    host::reduce(job);
    host::dequantize({format, DataType::kFp32, 1, sum.data(), 0, 64, rounded.data(), 64, 64});
    for (size_t i = 0; i < 64; ++i) mean[i] += double{rounded[i]} / 4096;
  }
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(mean[i], exact[i], 0.003 * exact[i] + 1e-3) << i;
}

}  // namespace
}  // namespace halfwire::test
