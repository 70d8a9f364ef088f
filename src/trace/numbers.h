// Numbers as traces write them. JSON parsers round times with more than 53 bits; these do not.
#pragma once

#include <cstdint>
#include <string_view>

namespace halfwire::trace {

enum class NumberError : uint8_t { kNone, kNotANumber, kOutOfRange };

// Recorded times stay within this many nanoseconds of 0 (about 126 years), so that sums of two of them cannot
// overflow.
inline constexpr int64_t kMaxTimeNs = 4'000'000'000'000'000'000;
// No interval is longer than this (28 hours).
inline constexpr int64_t kMaxDurationNs = 100'000'000'000'000;

// A JSON token of decimal microseconds ("1669783687464181.123", 12, "12.5", 1.5e3) as nanoseconds, rounded to
// nearest.
NumberError parseMicroseconds(std::string_view token, int64_t* ns);

// An integer in any of the forms met: 7, "7", "stream 7", 7.0; integers from 2^63 to 2^64 keep their 64 bits.
bool parseLooseInteger(std::string_view token, int64_t* value);

// The token without the white space after it and without its quotes.
std::string_view unquoted(std::string_view token);

}  // namespace halfwire::trace
