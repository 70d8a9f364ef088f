// The three jobs of the wire: quantize a buffer into packets, dequantize packets into a buffer, and sum packets.
// The same job structs go to the scalar reference, to the host SIMD code and to the CUDA kernels, and all of them
// give the same bits.
#pragma once

#include <cstdint>

#include "wire/format.h"
#include "wire/rounding.h"

namespace halfwire {

// A multiplier applied to every element in fp32 before quantizing (PreMulSum). With `device` set the value is read
// there, in the job's data type, when the job runs; otherwise `value` holds it.
struct Factor {
  const void* device = nullptr;
  float value = 1.0f;
  bool present = false;
};

// Cuts `segments` runs of elements out of `in` and writes one packet for each.
// Segment i starts at element i * in_pitch and has min(segment_elements, max(0, in_total - i * in_pitch)) elements;
// its packet starts at byte i * out_pitch of `out`. Empty segments write nothing.
// `in` is aligned to its element type; `out` and out_pitch to kPacketAlignment.
struct QuantizeJob {
  WireFormat format;
  DataType type = DataType::kBf16;
  uint32_t segments = 1;
  const void* in = nullptr;
  uint64_t in_pitch = 0;          // elements
  uint64_t in_total = 0;          // elements
  uint64_t segment_elements = 0;  // elements
  void* out = nullptr;
  uint64_t out_pitch = 0;  // bytes
  Factor factor;
  Rounding rounding;  // element i of `in` is number rounding.first + i
};

// The reverse of QuantizeJob: packet i becomes segment i of `out`.
struct DequantizeJob {
  WireFormat format;
  DataType type = DataType::kBf16;
  uint32_t segments = 1;
  const void* in = nullptr;
  uint64_t in_pitch = 0;  // bytes
  uint64_t segment_elements = 0;
  void* out = nullptr;
  uint64_t out_pitch = 0;  // elements
  uint64_t out_total = 0;  // elements
};

// Sums `packets` packets of `elements` elements in packet order in fp32. Packet i starts at byte i * in_pitch of `in`,
// except packet `own_index`, which starts at `own` (set own_index to -1 for none). The sum becomes a packet
// (`to_packet`) or elements of `type` at `out`. `out` overlaps no input packet.
struct ReduceJob {
  WireFormat format;
  DataType type = DataType::kBf16;  // decides what overflows, also where the sum becomes a packet
  bool to_packet = true;
  uint32_t packets = 1;
  const void* in = nullptr;
  uint64_t in_pitch = 0;  // bytes
  const void* own = nullptr;
  int32_t own_index = -1;
  float average = 1.0f;  // RN(1 / ranks) for an average, 1 for a sum
  uint64_t elements = 0;
  void* out = nullptr;
  Rounding rounding;  // of a sum that becomes a packet
};

namespace reference {

// Scalar, in the order of operations that docs/wire-format.md lists: the meaning of the format. Thread-safe.
void quantize(const QuantizeJob& job);
void dequantize(const DequantizeJob& job);
void reduce(const ReduceJob& job);

}  // namespace reference

namespace host {

// The fastest code for this processor, bit for bit equal to the reference; single-threaded. Independent of the
// caller's rounding and flush-to-zero mode, which it restores. Thread-safe.
void quantize(const QuantizeJob& job);
void dequantize(const DequantizeJob& job);
void reduce(const ReduceJob& job);

// "AVX3", "AVX2", "SSE4", "SSSE3" or "scalar": what the functions above run as.
const char* simdTarget();

}  // namespace host

}  // namespace halfwire
