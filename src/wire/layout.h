// Where the parts of jobs lie: segments of buffers, parts of packets. Shared by the scalar and the SIMD code.
#pragma once

#include <algorithm>
#include <cstring>

#include "wire/codec.h"

namespace halfwire {

inline constexpr uint32_t kMaxBlock = 256;

// First element and length of segment `i` of a buffer of `total` elements.
struct Segment {
  uint64_t start = 0;
  uint64_t elements = 0;
};

inline Segment segmentAt(uint64_t i, uint64_t pitch, uint64_t total, uint64_t segment_elements) {
  uint64_t start = 0;
  if (__builtin_mul_overflow(i, pitch, &start) || start >= total) return {};
  return {start, std::min(segment_elements, total - start)};
}

// Start of packet `k` of a reduction.
inline const uint8_t* reducePacket(const ReduceJob& job, uint32_t k) {
  if (job.own_index >= 0 && static_cast<uint32_t>(job.own_index) == k)
    return static_cast<const uint8_t*>(job.own);
  return static_cast<const uint8_t*>(job.in) + k * job.in_pitch;
}

// Zeroes the padding behind the codes and behind the scales.
inline void zeroPadding(const WireFormat& format, uint64_t elements, uint8_t* packet) {
  if (elements == 0) return;
  const uint64_t scales = scaleOffset(format, elements);
  const uint64_t scales_end = scales + blockCount(format, elements) * scaleBytes(format.scale);
  std::memset(packet + elements, 0, scales - elements);
  std::memset(packet + scales_end, 0, packetBytes(format, elements) - scales_end);
}

}  // namespace halfwire
