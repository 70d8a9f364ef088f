// The arguments of the CUDA kernels as plain values, shared by the kernels and the code that launches them.
// Each kernel takes one of these structs by value.
#pragma once

#include <cstdint>

#include "wire/compare.h"
#include "wire/format.h"
#include "wire/perturb.h"

namespace halfwire {

// How FP8 codes are made and read: by the instructions that GPUs have from compute capability 8.9 on, or by
// integer and fp32 arithmetic. Both give the same bits. Stochastic rounding is arithmetic on every GPU.
enum class CodecPath : uint8_t { kHardware = 0, kSoftware = 1, kStochastic = 2 };

// How loads of data that is read once go through the caches: kept in L1 like any other, or not.
enum class LoadHint : uint8_t { kDefault = 0, kStreaming = 1 };

// Elements that one thread of any kernel handles at a time: what fills a 16-byte access of one-byte codes.
inline constexpr uint32_t kThreadElements = 16;

// One quantize launch: grid.x tiles of a segment, grid.y segments from `first_segment` on.
struct QuantizeParams {
  const void* in;
  uint64_t in_pitch;  // elements
  uint64_t in_total;
  uint64_t segment_elements;
  uint8_t* out;
  uint64_t out_pitch;  // bytes
  const void* factor_device;
  uint64_t rounding_key;    // of stochastic kernels
  uint64_t rounding_first;  // number of in's first element
  float factor;  // 1 for none: multiplying by it changes no value
  uint32_t first_segment;
  uint32_t block_log2;
  uint32_t amax_lanes;  // neighbouring lanes that hold one row of a block, 4, 8 or 16
  ScaleFormat scale;
};

struct DequantizeParams {
  const uint8_t* in;
  uint64_t in_pitch;  // bytes
  uint64_t segment_elements;
  void* out;
  uint64_t out_pitch;  // elements
  uint64_t out_total;
  uint32_t first_segment;
  uint32_t block_log2;
  ScaleFormat scale;
};

struct ReduceParams {
  const uint8_t* in;
  uint64_t in_pitch;  // bytes
  const uint8_t* own;
  uint64_t elements;
  void* out;
  uint64_t rounding_key;    // of stochastic kernels
  uint64_t rounding_first;  // number of the first element
  uint32_t packets;
  int32_t own_index;
  uint32_t block_log2;
  float average;
  float bound;             // b of docs/wire-format.md
  uint32_t overflow_bits;  // bits of O(T)
  ScaleFormat scale;
};

// One perturb launch: grid.x tiles of the elements.
struct PerturbParams {
  void* data;
  uint64_t elements;
  uint64_t seed;
  PerturbStep step;
};

// One compare launch: warps take blocks of kCompareBlock elements in turn.
struct CompareParams {
  const void* exact;
  const void* other;
  uint64_t elements;
  ErrorSums* sums;
};

}  // namespace halfwire
