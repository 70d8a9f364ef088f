#include "base/units.h"

#include <gtest/gtest.h>

namespace halfwire {
namespace {

TEST(Units, Bytes) {
  EXPECT_EQ(parseBytes("4MiB").value(), 4u << 20);
  EXPECT_EQ(parseBytes("65536").value(), 65536u);
  EXPECT_EQ(parseBytes("1.5KiB").value(), 1536u);
  EXPECT_EQ(parseBytes("2MB").value(), 2000000u);
  for (const char* text : {"", "-1", "4mib", "0.3", "1e300", "nan", "4MiBx"})
    EXPECT_FALSE(parseBytes(text).ok()) << text;
}

TEST(Units, BitRate) {
  EXPECT_DOUBLE_EQ(parseBitRate("300Mbit").value(), 3e8);
  EXPECT_DOUBLE_EQ(parseBitRate("2.5Gbit").value(), 2.5e9);
  EXPECT_DOUBLE_EQ(parseBitRate("100MB/s").value(), 8e8);
  for (const char* text : {"", "0Mbit", "-1Gbit", "10", "Gbit", "1Tbit"})
    EXPECT_FALSE(parseBitRate(text).ok()) << text;
}

TEST(Units, Integer) {
  EXPECT_EQ(parseInteger("7", 1, 9, "digit").value(), 7);
  for (const char* text : {"", "0", "10", "7x", "99999999999999999999"})
    EXPECT_FALSE(parseInteger(text, 1, 9, "digit").ok());
}

}  // namespace
}  // namespace halfwire
