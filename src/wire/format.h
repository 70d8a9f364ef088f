// The packed block format: which bytes a message of `count` elements becomes. docs/wire-format.md is
// normative.
#pragma once

#include <cstdint>

namespace halfwire {

enum class ElementFormat : uint8_t { kE4M3 = 0, kE5M2 = 1, kInt8 = 2, kE3M4 = 3 };
inline constexpr ElementFormat kElementFormats[] = {ElementFormat::kE4M3, ElementFormat::kE5M2,
                                                    ElementFormat::kInt8, ElementFormat::kE3M4};
inline constexpr uint32_t kElementFormatCount = 4;
enum class ScaleFormat : uint8_t { kFp32 = 0, kE8M0 = 1 };
enum class DataType : uint8_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

struct WireFormat {
  ElementFormat element = ElementFormat::kE4M3;
  ScaleFormat scale = ScaleFormat::kFp32;
  uint16_t block = 128;  // 32, 64, 128 or 256 elements share one scale

  bool operator==(const WireFormat&) const = default;
};

// Parts of a packet and packets themselves start at multiples of this many bytes from the packet's start.
inline constexpr uint64_t kPacketAlignment = 16;

constexpr uint64_t roundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t scaleBytes(ScaleFormat scale) { return scale == ScaleFormat::kFp32 ? 4 : 1; }

constexpr uint64_t dataTypeBytes(DataType type) { return type == DataType::kFp32 ? 4 : 2; }

constexpr uint64_t blockCount(const WireFormat& f, uint64_t elements) {
  return (elements + f.block - 1) / f.block;
}

// Offset of the scales from the start of a packet of `elements` elements: the payload, padded.
constexpr uint64_t scaleOffset(const WireFormat&, uint64_t elements) {
  return roundUp(elements, kPacketAlignment);
}

// Bytes of a packet of `elements` elements; 0 for 0. Padding bytes are zero.
constexpr uint64_t packetBytes(const WireFormat& f, uint64_t elements) {
  return scaleOffset(f, elements) + roundUp(blockCount(f, elements) * scaleBytes(f.scale), kPacketAlignment);
}

// Elements of every shard but the last non-empty one when `count` elements are cut for `ranks` ranks: a
// multiple of the block, so that blocks sit at multiples of the block from the start of the user's buffer
// whatever the cut.
constexpr uint64_t shardElements(const WireFormat& f, uint64_t count, uint32_t ranks) {
  return roundUp((count + ranks - 1) / ranks, f.block);
}

// "e4m3" and so on, "?" for what is no format.
constexpr const char* elementFormatName(ElementFormat f) {
  switch (f) {
    case ElementFormat::kE4M3:
      return "e4m3";
    case ElementFormat::kE5M2:
      return "e5m2";
    case ElementFormat::kInt8:
      return "int8";
    case ElementFormat::kE3M4:
      return "e3m4";
  }
  return "?";
}

// Largest magnitude an element code decodes to before scaling.
constexpr float elementMax(ElementFormat f) {
  switch (f) {
    case ElementFormat::kE4M3:
      return 448.0f;
    case ElementFormat::kE5M2:
      return 57344.0f;
    case ElementFormat::kInt8:
      return 127.0f;
    case ElementFormat::kE3M4:
      return 30.0f;
  }
  return 0.0f;
}

// The code that says "not finite" (the encoder writes this one; docs/wire-format.md lists what decoders
// accept).
constexpr uint8_t nonFiniteCode(ElementFormat f) { return f == ElementFormat::kInt8 ? 0x80 : 0x7f; }

}  // namespace halfwire
