// Conversions between the data types against their definitions.
#include "wire/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "wire/oracle.h"

namespace halfwire::test {
namespace {

TEST(Convert, EveryFp16ValueAndBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = fp16ToFloat(static_cast<uint16_t>(bits));
    const uint32_t field = bits >> 10 & 31, mantissa = bits & 1023;
    if (field == 31 && mantissa != 0) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_EQ(floatToFp16(value), kCanonicalNan16) << bits;
      continue;
    }
    const double magnitude = field == 31  ? std::numeric_limits<double>::infinity()
                             : field == 0 ? std::ldexp(mantissa, -24)
                                          : std::ldexp(1024 + mantissa, static_cast<int>(field) - 25);
    EXPECT_EQ(value, bits & 0x8000 ? -magnitude : magnitude) << bits;
    EXPECT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    EXPECT_EQ(floatToFp16(value), bits) << bits;
  }
}

TEST(Convert, EveryBf16ValueAndBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bf16ToFloat(static_cast<uint16_t>(bits));
    const bool nan = (bits & 0x7fff) > 0x7f80;
    EXPECT_EQ(std::isnan(value), nan) << bits;
    EXPECT_EQ(floatToBf16(value), nan ? kCanonicalNan16 : bits) << bits;
  }
}

TEST(Convert, FloatsRoundToNearestEven) {
  std::mt19937 random(7);
  const auto check = [](uint32_t bits) {
    const auto value = std::bit_cast<float>(bits);
    for (DataType type : {DataType::kBf16, DataType::kFp16}) {
      const uint16_t got = type == DataType::kBf16 ? floatToBf16(value) : floatToFp16(value);
      ASSERT_EQ(got, oracle::bitsOf(type, oracle::toType(type, value))) << name(type) << " of bits " << bits;
    }
  };
  for (int i = 0; i < 300000; ++i) check(random());
  // Around every midpoint of fp16: from 2^-26 to 2^17 the upper bits in full, the lower ones at and beside
  // one half.
  for (uint32_t top = 0x32800000u >> 13; top < 0x48000000u >> 13; ++top) {
    for (uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) check(top << 13 | low);
  }
}

}  // namespace
}  // namespace halfwire::test
