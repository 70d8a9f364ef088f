// Which of a program's NVTX ranges are its steps, by their names.
#pragma once

#include <array>
#include <string_view>

namespace halfwire::meter {

inline constexpr size_t kMostRangeName = 63;

// Whether a value of HALFWIRE_METER_RANGE can name ranges: 1 to 63 printable ASCII characters, no blank at
// either end.
bool isRangeName(std::string_view name);

// Immutable; allocates nothing.
class StepRanges {
 public:
  // Ranges called `wanted` count, or if it is empty those with one of the usual names: iteration, step,
  // train_step, ProfilerStep, in any case of letters. A number may follow, behind blanks, "_", ":", "#" or
  // nothing. A `wanted` that isRangeName refuses names no range.
  explicit StepRanges(std::string_view wanted);

  // The name, without the number, of a range that is a step; null for all others. It lives as long as the
  // object.
  const char* nameOf(std::string_view text) const;
  // The same for what was once returned by nameOf, which may be any pointer.
  const char* nameOfHandle(const void* handle) const;

 private:
  std::array<char, kMostRangeName + 1> wanted_{};
  bool usual_;
};

}  // namespace halfwire::meter
