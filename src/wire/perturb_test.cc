// Noise against its definition, element by element over every value of 16 bits.
#include "wire/perturb.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "wire/convert.h"

namespace halfwire {
namespace {

double valueOf(DataType type, uint32_t bits) {
  if (type == DataType::kBf16) return bf16ToFloat(static_cast<uint16_t>(bits));
  if (type == DataType::kFp16) return fp16ToFloat(static_cast<uint16_t>(bits));
  return std::bit_cast<float>(bits);
}

// One ulp of bf16 at `value`, whatever its type: eight bits of significand.
double ulpOfBf16(double value) { return std::ldexp(1.0, std::ilogb(value) - 7); }

template <class Bits>
void everyValueMovesByOneUlp(DataType type, const std::vector<Bits>& in, double smallest_normal) {
  std::vector<Bits> out = in;
  perturb({type, out.data(), out.size(), 5});
  uint64_t up = 0, down = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    const double before = valueOf(type, in[i]), after = valueOf(type, out[i]);
    if (!std::isfinite(before) || before == 0) {
      ASSERT_EQ(in[i], out[i]) << i;
      continue;
    }
    ASSERT_TRUE(std::isfinite(after)) << before;
    ASSERT_EQ(std::signbit(before), std::signbit(after)) << before;
    ASSERT_NE(after, 0) << before;
    if (std::abs(before) < smallest_normal * 2) continue;  // there an ulp is the type's own
    if (in[i] == out[i]) {
      ASSERT_GT(std::abs(before) + ulpOfBf16(before), std::abs(valueOf(type, perturbStep(type).infinity - 1)))
          << before;
      continue;
    }
    // Past a power of two some of the last places that a step is made of are half or twice as large.
    const double moved = std::abs(after - before) / ulpOfBf16(before);
    ASSERT_LT(moved, 2.0) << before;
    ASSERT_GE(moved, 0.5) << before;
    ++(std::abs(after) > std::abs(before) ? up : down);
  }
  EXPECT_NEAR(static_cast<double>(up) / static_cast<double>(up + down), 0.5, 0.01);
}

TEST(Perturb, EveryValueOf16BitsMovesByOneUlpOfBf16OrStays) {
  std::vector<uint16_t> all(65536);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  everyValueMovesByOneUlp(DataType::kBf16, all, 0x1p-126);
  everyValueMovesByOneUlp(DataType::kFp16, all, 0x1p-14);
}

TEST(Perturb, ValuesOf32BitsMoveByOneUlpOfBf16) {
  std::vector<uint32_t> some(1u << 20);
  for (uint32_t i = 0; i < some.size(); ++i) some[i] = i * 4099u;
  everyValueMovesByOneUlp(DataType::kFp32, some, 0x1p-126);
}

TEST(Perturb, FollowsTheSeedAlone) {
  std::vector<uint16_t> a(1000, 0x3f80), b = a, c = a;
  perturb({DataType::kBf16, a.data(), a.size(), 7});
  perturb({DataType::kBf16, b.data(), b.size(), 7});
  perturb({DataType::kBf16, c.data(), c.size(), 8});
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

}  // namespace
}  // namespace halfwire
