// Numbers of docs/wire-format.md that depend on the data type or the format.
#pragma once

#include <bit>
#include <cstdint>

#include "wire/convert.h"
#include "wire/format.h"

namespace halfwire {

// The floor of fp32 scales.
inline constexpr float kMinScale = 0x1p-126f;

// Bits of O(T), the smallest magnitude that rounds to infinity in T.
constexpr uint32_t overflowBits(DataType type) {
  switch (type) {
    case DataType::kBf16:
      return 0x7f7f8000u;  // 255.5 * 2^120
    case DataType::kFp16:
      return 0x477ff000u;  // 65520
    case DataType::kFp32:
      return 0x7f800000u;
  }
  return 0;
}

// X(T), the largest finite value of T.
constexpr float typeMax(DataType type) {
  switch (type) {
    case DataType::kBf16:
      return bf16ToFloat(0x7f7f);
    case DataType::kFp16:
      return 65504.0f;
    case DataType::kFp32:
      return std::bit_cast<float>(0x7f7fffffu);
  }
  return 0.0f;
}

}  // namespace halfwire
