// Sizes and rates as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace halfwire {

// "4MiB", "64KiB", "1GiB", "512", "2MB" (1e6): bytes. Refuses negative, fractional bytes and overflow.
Result<uint64_t> parseBytes(std::string_view text);

// "300Mbit", "1Gbit", "2.5Gbit", "100MB/s": bits per second. Refuses 0 and negative rates.
Result<double> parseBitRate(std::string_view text);

// "4 MiB", "1.5 GiB", "17 B".
std::string formatBytes(uint64_t bytes);

// A whole decimal number in [min, max]; `what` names it in the error.
Result<int64_t> parseInteger(std::string_view text, int64_t min, int64_t max, std::string_view what);

}  // namespace halfwire
