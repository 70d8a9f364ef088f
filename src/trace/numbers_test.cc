#include "trace/numbers.h"

#include <gtest/gtest.h>

#include <string>

namespace halfwire::trace {
namespace {

int64_t ns(std::string_view token) {
  int64_t value = -1;
  EXPECT_EQ(parseMicroseconds(token, &value), NumberError::kNone) << token;
  return value;
}

TEST(ParseMicroseconds, KeepsEveryNanosecond) {
  EXPECT_EQ(ns("1712195495519689.047"), 1712195495519689047);
  EXPECT_EQ(ns("0"), 0);
  EXPECT_EQ(ns("-27.5 "), -27500);
  EXPECT_EQ(ns("\"12.25\""), 12250);
  EXPECT_EQ(ns("7."), 7000);
  EXPECT_EQ(ns("848671.6747283936"), 848671675);  // rounds to nearest
  EXPECT_EQ(ns("1.5e3"), 1500000);
}

TEST(ParseMicroseconds, RefusesWhatIsNoTime) {
  int64_t value = 0;
  for (const char* bad : {"", "\"\"", "null", "abc", "1.2.3", "--1", "nan", "{"}) {
    EXPECT_EQ(parseMicroseconds(bad, &value), NumberError::kNotANumber) << bad;
  }
  for (const char* far :
       {"1e300", "99999999999999999999", "9223372036854775807", "-1e19", "4000000000000001"}) {
    EXPECT_EQ(parseMicroseconds(far, &value), NumberError::kOutOfRange) << far;
  }
}

TEST(ParseLooseInteger, ReadsWhatRecordersWrite) {
  int64_t value = 0;
  EXPECT_TRUE(parseLooseInteger("7", &value) && value == 7);
  EXPECT_TRUE(parseLooseInteger("\"stream 7\"", &value) && value == 7);
  EXPECT_TRUE(parseLooseInteger("-549452224", &value) && value == -549452224);
  EXPECT_TRUE(parseLooseInteger("7.0", &value) && value == 7);
  EXPECT_TRUE(parseLooseInteger("10159970886766084423", &value));
  EXPECT_EQ(static_cast<uint64_t>(value), 10159970886766084423ULL);
  for (const char* bad : {"", "\"PyTorch Profiler\"", "7.5", "99999999999999999999999", "[1]", "7x"}) {
    EXPECT_FALSE(parseLooseInteger(bad, &value)) << bad;
  }
}

}  // namespace
}  // namespace halfwire::trace
