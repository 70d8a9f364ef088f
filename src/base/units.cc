#include "base/units.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace halfwire {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

Status bad(std::string_view text, std::string_view what, std::string_view example) {
  return {StatusCode::kInvalidArgument, fmt::format("'{}' is not {}: write it like {}", text, what, example)};
}

// Splits "2.5Gbit" into 2.5 and "Gbit".
bool splitNumber(std::string_view text, double* number, std::string_view* unit) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  if (error != std::errc() || !std::isfinite(*number)) return false;
  *unit = text.substr(static_cast<size_t>(end - text.data()));
  while (!unit->empty() && unit->front() == ' ') unit->remove_prefix(1);
  return true;
}

}  // namespace

Result<uint64_t> parseBytes(std::string_view text) {
  static constexpr Unit kUnits[] = {
      {"", 1},     {"B", 1},    {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0},
      {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
  double number = 0;
  std::string_view unit;
  if (!splitNumber(text, &number, &unit) || number < 0) return bad(text, "a size", "4MiB or 65536");
  for (const Unit& u : kUnits) {
    if (u.name != unit) continue;
    const double bytes = number * u.factor;
    if (bytes != std::floor(bytes) || bytes > 9.0e15)
      return bad(text, "a whole number of bytes", "4MiB or 65536");
    return static_cast<uint64_t>(bytes);
  }
  return bad(text, "a size", "4MiB or 65536");
}

Result<double> parseBitRate(std::string_view text) {
  static constexpr Unit kUnits[] = {{"bit", 1},    {"kbit", 1e3},   {"Kbit", 1e3},
                                    {"Mbit", 1e6}, {"Gbit", 1e9},   {"MB/s", 8e6},
                                    {"GB/s", 8e9}, {"Mbit/s", 1e6}, {"Gbit/s", 1e9}};
  double number = 0;
  std::string_view unit;
  if (!splitNumber(text, &number, &unit) || number <= 0) return bad(text, "a rate", "300Mbit or 1Gbit");
  for (const Unit& u : kUnits) {
    if (u.name == unit) return number * u.factor;
  }
  return bad(text, "a rate", "300Mbit or 1Gbit");
}

std::string formatBytes(uint64_t bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 4) value /= 1024.0, ++unit;
  if (value == std::floor(value)) return fmt::format("{} {}", static_cast<uint64_t>(value), kNames[unit]);
  return fmt::format("{:.2f} {}", value, kNames[unit]);
}

Result<int64_t> parseInteger(std::string_view text, int64_t min, int64_t max, std::string_view what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < min || value > max) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("'{}' is not a valid {}: give a whole number from {} to {}", text, what, min, max));
  }
  return value;
}

}  // namespace halfwire
