// The three jobs of the wire as CUDA kernel bodies, templated on what changes the inner loop. kernels.cu
// instantiates them; docs/kernels.md has their shapes, registers and rates.
#pragma once

#include "wire/cuda_arithmetic.h"

namespace halfwire::cuda {

template <LoadHint H>
__device__ __forceinline__ uint4 load16(const void* pointer) {
  uint4 v;
  if constexpr (H == LoadHint::kStreaming) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(pointer));
  } else {
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(pointer));
  }
  return v;
}

__device__ __forceinline__ bool aligned16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15u) == 0;
}

__device__ __forceinline__ uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Elements of T in 16 bytes, and the 16-byte vectors that hold kThreadElements elements.
template <DataType T>
inline constexpr uint32_t kVector = 16 / dataTypeBytes(T);
template <DataType T>
inline constexpr uint32_t kRows = kThreadElements / kVector<T>;

// 16 bytes of elements from `in + first`, each read by itself where `valid` of them exist; zeros for the
// rest.
template <DataType T>
__device__ __forceinline__ uint4 gatherVector(const void* in, uint64_t first, uint32_t valid) {
  uint32_t word[4] = {};
  if constexpr (T == DataType::kFp32) {
    const uint32_t* elements = static_cast<const uint32_t*>(in) + first;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (i < valid) word[i] = __ldg(elements + i);
    }
  } else {
    const uint16_t* elements = static_cast<const uint16_t*>(in) + first;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < valid) word[i / 2] |= uint32_t{__ldg(elements + i)} << (16 * (i % 2));
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <DataType T>
__device__ __forceinline__ void scatterVector(void* out, uint64_t first, uint32_t valid,
                                              const uint32_t (&word)[4]) {
  if constexpr (T == DataType::kFp32) {
    uint32_t* elements = static_cast<uint32_t*>(out) + first;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (i < valid) elements[i] = word[i];
    }
  } else {
    uint16_t* elements = static_cast<uint16_t*>(out) + first;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < valid) elements[i] = static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
    }
  }
}

// The largest over groups of `lanes` (2, 4, 8 or 16) neighbouring lanes, kFrom of which are always taken. All
// lanes of the warp must call.
template <uint32_t kFrom>
__device__ __forceinline__ uint32_t groupMax(uint32_t value, uint32_t lanes) {
#pragma unroll
  for (uint32_t offset = 1; offset < 16; offset *= 2) {
    if (offset < kFrom || offset < lanes) value = maxOf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

__device__ __forceinline__ void storeScale(uint8_t* scales, ScaleFormat format, uint64_t block,
                                           uint32_t stored) {
  if (format == ScaleFormat::kFp32) {
    reinterpret_cast<uint32_t*>(scales)[block] = stored;
  } else {
    scales[block] = static_cast<uint8_t>(stored);
  }
}

// Scales are read as the aligned word around them and made a number where they are used: a load that needs no
// arithmetic before the next load can be issued, whatever the format.
struct ScaleReader {
  uint64_t offset;    // of the word behind the start of the scales
  uint32_t selector;  // of the scale's bytes in the word
  uint32_t shift;     // that makes them fp32 bits

  __device__ __forceinline__ ScaleReader(ScaleFormat format, uint64_t block)
      : offset(format == ScaleFormat::kFp32 ? block * 4 : block & ~uint64_t{3}),
        selector(format == ScaleFormat::kFp32 ? 0x3210u : 0x4440u | (static_cast<uint32_t>(block) & 3u)),
        shift(format == ScaleFormat::kFp32 ? 0 : 23) {}

  __device__ __forceinline__ uint32_t load(const uint8_t* scales) const {
    return __ldg(reinterpret_cast<const uint32_t*>(scales + offset));
  }
  __device__ __forceinline__ float scale(uint32_t word) const {
    return floatOf(pickBytes(word, 0, selector) << shift);
  }
};

// Zeroes the bytes behind the last scale of a packet.
__device__ __forceinline__ void padScales(uint8_t* scales, ScaleFormat format, uint64_t blocks) {
  const uint64_t used = blocks * scaleBytes(format);
  const uint64_t end = roundUp(used, kPacketAlignment);
#pragma unroll 1
  for (uint64_t i = used; i < end; ++i) scales[i] = 0;
}

// ---- quantize ----

// Eight neighbouring lanes hold 128 consecutive elements, each lane one vector of every row of 8 vectors, so
// that every access of eight lanes is one full line of input and at least one full sector of codes. kBlocks
// is how many blocks a lane's elements belong to: 1 for blocks of 128 and 256 elements, 2 or 4 below.
template <DataType T, ElementFormat F, CodecPath P, uint32_t kBlocks, uint32_t kThreads, uint32_t kRepeat,
          LoadHint H>
struct Quantize {
  static constexpr uint32_t kTile = kThreads * kThreadElements * kRepeat;
  static constexpr uint32_t kV = kVector<T>;
  static constexpr uint32_t kR = kRows<T>;
  static constexpr uint32_t kRowsPerBlock = kR / kBlocks;
  static constexpr uint32_t kFewestLanes = T == DataType::kFp32 || kBlocks == 1 ? 8 : 4;

  struct Segment {
    const uint8_t* in;
    uint64_t elements;
    uint8_t* codes;
    uint8_t* scales;
    float factor;
    uint64_t rounding_first;
  };

  // The value of element `i` of a row, or zero where the packet has no such element.
  template <bool kFull>
  static __device__ __forceinline__ void rowValues(const uint4& raw, float factor, uint32_t valid,
                                                   float (&y)[kV]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) loadWord<T>(word[i], y + i * (kV / 4));
#pragma unroll
    for (uint32_t i = 0; i < kV; ++i) {
      y[i] = mulRn(y[i], factor);
      if (!kFull && i >= valid) y[i] = 0.0f;
    }
  }

  template <bool kFull>
  static __device__ __forceinline__ void tile(const QuantizeParams& p, const Segment& s,
                                              uint64_t tile_start) {
    constexpr uint32_t kOverflow = overflowBits(T);
    constexpr uint32_t kUnroll = kFull ? kRepeat : 1;
    const bool vectors = kFull || aligned16(s.in);
    for (uint32_t part = 0; part < kRepeat; part += kUnroll) {
      uint4 raw[kUnroll][kR];
      uint64_t start[kUnroll];
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        start[u] = tile_start + (part + u) * (kThreads * kThreadElements) + (threadIdx.x / 8) * 128 +
                   (threadIdx.x % 8) * kV;
#pragma unroll
        for (uint32_t r = 0; r < kR; ++r) {
          const uint64_t first = start[u] + r * (8 * kV);
          if (kFull || (vectors && first + kV <= s.elements)) {
            raw[u][r] = load16<H>(s.in + first * dataTypeBytes(T));
          } else {
            raw[u][r] = gatherVector<T>(
                s.in, first, first < s.elements ? static_cast<uint32_t>(least(kV, s.elements - first)) : 0);
          }
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        float y[kR][kV];
        uint32_t valid[kR];
        uint32_t amax[kBlocks] = {};
#pragma unroll
        for (uint32_t r = 0; r < kR; ++r) {
          const uint64_t first = start[u] + r * (8 * kV);
          valid[r] = kFull                ? kV
                     : first < s.elements ? static_cast<uint32_t>(least(kV, s.elements - first))
                                          : 0;
          rowValues<kFull>(raw[u][r], s.factor, valid[r], y[r]);
#pragma unroll
          for (uint32_t i = 0; i < kV; ++i) {
            amax[r / kRowsPerBlock] = maxOf(amax[r / kRowsPerBlock], bitsOf(y[r][i]) & 0x7fffffffu);
          }
        }
        bool overflow = false;
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
          amax[b] = groupMax<kFewestLanes>(amax[b], p.amax_lanes);
          overflow |= amax[b] >= kOverflow;
        }
        // Rare: something in this warp is not finite, so the largest finite values are looked for again.
        const bool special = __any_sync(0xffffffffu, overflow);
        if (special) {
#pragma unroll
          for (uint32_t b = 0; b < kBlocks; ++b) {
            amax[b] = 0;
#pragma unroll
            for (uint32_t r = b * kRowsPerBlock; r < (b + 1) * kRowsPerBlock; ++r) {
#pragma unroll
              for (uint32_t i = 0; i < kV; ++i) {
                const uint32_t magnitude = bitsOf(y[r][i]) & 0x7fffffffu;
                if (magnitude < kOverflow) amax[b] = maxOf(amax[b], magnitude);
              }
            }
            amax[b] = groupMax<kFewestLanes>(amax[b], p.amax_lanes);
          }
        }
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
          const BlockScale scale = blockScale<F>(p.scale, amax[b]);
          const uint64_t block_start = start[u] + b * kRowsPerBlock * (8 * kV);
          if ((threadIdx.x & (p.amax_lanes - 1)) == 0 && (kFull || block_start < s.elements)) {
            storeScale(s.scales, p.scale, block_start >> p.block_log2, scale.stored);
          }
#pragma unroll
          for (uint32_t r = b * kRowsPerBlock; r < (b + 1) * kRowsPerBlock; ++r) {
            uint32_t codes[kV / 4];
#pragma unroll
            for (uint32_t w = 0; w < kV / 4; ++w) {
              const float(&from)[4] = *reinterpret_cast<const float(*)[4]>(&y[r][4 * w]);
              const float z[4] = {mulRn(from[0], scale.v), mulRn(from[1], scale.v), mulRn(from[2], scale.v),
                                  mulRn(from[3], scale.v)};
              if constexpr (P == CodecPath::kStochastic) {
                codes[w] = encodeStochastic4<F>(z, p.rounding_key,
                                                s.rounding_first + start[u] + r * (8 * kV) + 4 * w);
              } else {
                codes[w] = encode4<F, P>(z);
              }
              if (special) codes[w] = markNonFinite<F>(codes[w], from, kOverflow);
            }
            // Codes behind the last element are +0, the packet's padding.
            const uint64_t first = start[u] + r * (8 * kV);
            if (kFull || first < roundUp(s.elements, kPacketAlignment)) {
              if constexpr (kV == 4) {
                *reinterpret_cast<uint32_t*>(s.codes + first) = codes[0];
              } else {
                *reinterpret_cast<uint2*>(s.codes + first) = make_uint2(codes[0], codes[1]);
              }
            }
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const QuantizeParams& p) {
    const uint64_t index = uint64_t{p.first_segment} + blockIdx.y;
    const uint64_t first = index * p.in_pitch;
    if (first >= p.in_total) return;
    Segment s;
    s.elements = least(p.segment_elements, p.in_total - first);
    const uint64_t tile_start = uint64_t{blockIdx.x} * kTile;
    if (tile_start >= s.elements) return;
    s.in = static_cast<const uint8_t*>(p.in) + first * dataTypeBytes(T);
    s.codes = p.out + index * p.out_pitch;
    s.scales = s.codes + roundUp(s.elements, kPacketAlignment);
    s.factor = p.factor;
    s.rounding_first = p.rounding_first + first;
    if (p.factor_device != nullptr) {
      if constexpr (T == DataType::kFp32) {
        s.factor = __ldg(static_cast<const float*>(p.factor_device));
      } else {
        float pair[2];
        loadWord<T>(__ldg(static_cast<const uint16_t*>(p.factor_device)), pair);
        s.factor = pair[0];
      }
    }
    const uint64_t left = s.elements - tile_start;
    if (left >= kTile && aligned16(s.in)) {
      tile<true>(p, s, tile_start);
    } else {
      tile<false>(p, s, tile_start);
    }
    if (left <= kTile && threadIdx.x == 0) {
      padScales(s.scales, p.scale, (s.elements + (1u << p.block_log2) - 1) >> p.block_log2);
    }
  }
};

// ---- dequantize ----

// Every thread takes kRepeat times kThreadElements elements in rows of one vector a thread, so that codes are
// read and elements written in full lines.
template <DataType T, ElementFormat F, CodecPath P, uint32_t kThreads, uint32_t kRepeat>
struct Dequantize {
  static constexpr uint32_t kTile = kThreads * kThreadElements * kRepeat;
  static constexpr uint32_t kV = kVector<T>;
  static constexpr uint32_t kR = kRows<T> * kRepeat;

  template <bool kFull>
  static __device__ __forceinline__ void tile(const DequantizeParams& p, const uint8_t* codes,
                                              const uint8_t* scales, uint8_t* out, uint64_t elements,
                                              uint64_t tile_start) {
    // Rows lie a multiple of four blocks apart, so that one reader serves all.
    static_assert(kThreads * kV % 1024 == 0);
    const uint64_t start = tile_start + threadIdx.x * kV;
    const ScaleReader reader(p.scale, start >> p.block_log2);
    const uint64_t row_scales = ((kThreads * kV) >> p.block_log2) * scaleBytes(p.scale);
    uint32_t word[kR][kV / 4];
    uint32_t scale_word[kR];
#pragma unroll
    for (uint32_t r = 0; r < kR; ++r) {
      const uint8_t* const from = codes + start + r * (kThreads * kV);
      if (!kFull && start + r * (kThreads * kV) >= elements) break;
      if constexpr (kV == 4) {
        word[r][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
        word[r][0] = both.x;
        word[r][1] = both.y;
      }
      scale_word[r] = reader.load(scales + r * row_scales);
    }
    // One decision for all rows: the general way is rare, and either way is right for every row.
    float scale[kR];
    bool within = true;
    uint32_t bad = 0;
#pragma unroll
    for (uint32_t r = 0; r < kR; ++r) {
      if (!kFull && start + r * (kThreads * kV) >= elements) break;
      scale[r] = reader.scale(scale_word[r]);
      within &= withinBound<F>(scale[r], typeMax(T));
      if constexpr (!kDecodesNan<F, P>) {
#pragma unroll
        for (uint32_t w = 0; w < kV / 4; ++w) bad |= anyNonFinite<F>(word[r][w]);
      }
    }
    if (within && bad == 0) {
      writeRows<kFull, true>(word, scale, out, elements, start);
    } else {
      writeRows<kFull, false>(word, scale, out, elements, start);
    }
  }

  template <bool kFull, bool kPlain>
  static __device__ __forceinline__ void writeRows(const uint32_t (&word)[kR][kV / 4],
                                                   const float (&scale)[kR], uint8_t* out, uint64_t elements,
                                                   uint64_t start) {
    const bool vectors = kFull || aligned16(out);
#pragma unroll
    for (uint32_t r = 0; r < kR; ++r) {
      const uint64_t first = start + r * (kThreads * kV);
      if (!kFull && first >= elements) break;
      float t[kV];
#pragma unroll
      for (uint32_t w = 0; w < kV / 4; ++w) {
        decodeScaled4<F, P>(word[r][w], scale[r], typeMax(T), kPlain,
                            *reinterpret_cast<float(*)[4]>(t + 4 * w));
      }
      uint32_t elements_out[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) elements_out[i] = storeWord<T>(t + i * (kV / 4));
      if (kFull || (vectors && first + kV <= elements)) {
        *reinterpret_cast<uint4*>(out + first * dataTypeBytes(T)) =
            make_uint4(elements_out[0], elements_out[1], elements_out[2], elements_out[3]);
      } else {
        scatterVector<T>(out, first, static_cast<uint32_t>(least(kV, elements - first)), elements_out);
      }
    }
  }

  static __device__ __forceinline__ void run(const DequantizeParams& p) {
    const uint64_t index = uint64_t{p.first_segment} + blockIdx.y;
    const uint64_t first = index * p.out_pitch;
    if (first >= p.out_total) return;
    const uint64_t elements = least(p.segment_elements, p.out_total - first);
    const uint64_t tile_start = uint64_t{blockIdx.x} * kTile;
    if (tile_start >= elements) return;
    const uint8_t* codes = p.in + index * p.in_pitch;
    const uint8_t* scales = codes + roundUp(elements, kPacketAlignment);
    uint8_t* out = static_cast<uint8_t*>(p.out) + first * dataTypeBytes(T);
    if (elements - tile_start >= kTile && aligned16(out)) {
      tile<true>(p, codes, scales, out, elements, tile_start);
    } else {
      tile<false>(p, codes, scales, out, elements, tile_start);
    }
  }
};

// ---- reduce ----

// A thread sums kThreadElements consecutive elements over all packets, the loads of kDepth packets in flight
// at a time.
template <ElementFormat F, CodecPath P, uint32_t kThreads, uint32_t kDepth, LoadHint H>
struct Reduce {
  static constexpr uint32_t kTile = kThreads * kThreadElements;

  // Adds packets [k, k + kDepth), or as many of them as there are, to acc. `at` is the offset of packet k
  // from the first one, and becomes that of packet k + kDepth.
  template <bool kAll>
  static __device__ __forceinline__ void addPackets(const ReduceParams& p, uint32_t k, uint64_t& at,
                                                    const uint8_t* codes_at, const uint8_t* scales_at,
                                                    const ScaleReader& reader,
                                                    float (&acc)[kThreadElements]) {
    uint4 codes[kDepth];
    uint32_t word[kDepth];
#pragma unroll
    for (uint32_t j = 0; j < kDepth; ++j) {
      if (!kAll && k + j >= p.packets) break;
      const uint64_t from = packetOffset(p, k + j, at);
      codes[j] = load16<H>(codes_at + from);
      word[j] = reader.load(scales_at + from);
      at += p.in_pitch;
    }
#pragma unroll
    for (uint32_t j = 0; j < kDepth; ++j) {
      if (!kAll && k + j >= p.packets) break;
      const float scale = mulRn(reader.scale(word[j]), p.average);
      uint32_t bad = 0;
      if constexpr (!kDecodesNan<F, P>) {
        bad = anyNonFinite<F>(codes[j].x) | anyNonFinite<F>(codes[j].y) | anyNonFinite<F>(codes[j].z) |
              anyNonFinite<F>(codes[j].w);
      }
      if (withinBound<F>(scale, p.bound) && bad == 0) {
        addPacket<true>(codes[j], scale, p.bound, acc);
      } else {
        addPacket<false>(codes[j], scale, p.bound, acc);
      }
    }
  }

  template <bool kPlain>
  static __device__ __forceinline__ void addPacket(const uint4& codes, float scale, float bound,
                                                   float (&acc)[kThreadElements]) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float t[4];
      decodeScaled4<F, P>(words[w], scale, bound, kPlain, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[4 * w + i] = addRn(acc[4 * w + i], t[i]);
    }
  }

  // Where packet k is, as an offset from `in`, given where it is in the row.
  static __device__ __forceinline__ uint64_t packetOffset(const ReduceParams& p, uint32_t k,
                                                          uint64_t in_row) {
    const uint64_t own_at = reinterpret_cast<uintptr_t>(p.own) - reinterpret_cast<uintptr_t>(p.in);
    return static_cast<int32_t>(k) == p.own_index ? own_at : in_row;
  }

  // Sums elements [first, first + kThreadElements); those at and behind `valid` become 0.
  static __device__ __forceinline__ void sum(const ReduceParams& p, uint64_t first, uint32_t valid,
                                             float (&acc)[kThreadElements]) {
    // -0 + t is t for every t, so that the sum starts from the first packet's own values.
#pragma unroll
    for (uint32_t i = 0; i < kThreadElements; ++i) acc[i] = -0.0f;
    if (valid != 0) {
      const ScaleReader reader(p.scale, first >> p.block_log2);
      const uint8_t* const codes_at = p.in + first;
      const uint8_t* const scales_at = p.in + roundUp(p.elements, kPacketAlignment);
      uint64_t at = 0;
      uint32_t k = 0;
#pragma unroll 1
      for (; k + kDepth <= p.packets; k += kDepth) {
        addPackets<true>(p, k, at, codes_at, scales_at, reader, acc);
      }
      if (k < p.packets) addPackets<false>(p, k, at, codes_at, scales_at, reader, acc);
    }
    if (valid < kThreadElements) {
#pragma unroll
      for (uint32_t i = 0; i < kThreadElements; ++i) {
        if (i >= valid) acc[i] = 0.0f;
      }
    }
  }

  static __device__ __forceinline__ void toPacket(const ReduceParams& p) {
    const uint64_t first = uint64_t{blockIdx.x} * kTile + threadIdx.x * kThreadElements;
    const uint32_t valid =
        first < p.elements ? static_cast<uint32_t>(least(kThreadElements, p.elements - first)) : 0;
    float acc[kThreadElements];
    sum(p, first, valid, acc);

    const uint32_t lanes = (1u << p.block_log2) / kThreadElements;
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t i = 0; i < kThreadElements; ++i) amax = maxOf(amax, bitsOf(acc[i]) & 0x7fffffffu);
    amax = groupMax<2>(amax, lanes);
    const bool special = __any_sync(0xffffffffu, amax >= p.overflow_bits);
    if (special) {
      amax = 0;
#pragma unroll
      for (uint32_t i = 0; i < kThreadElements; ++i) {
        const uint32_t magnitude = bitsOf(acc[i]) & 0x7fffffffu;
        if (magnitude < p.overflow_bits) amax = maxOf(amax, magnitude);
      }
      amax = groupMax<2>(amax, lanes);
    }
    if (valid == 0) return;
    const BlockScale scale = blockScale<F>(p.scale, amax);
    uint8_t* packet = static_cast<uint8_t*>(p.out);
    uint8_t* scales = packet + roundUp(p.elements, kPacketAlignment);
    if ((threadIdx.x & (lanes - 1)) == 0) storeScale(scales, p.scale, first >> p.block_log2, scale.stored);
    uint32_t codes[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      const float(&from)[4] = *reinterpret_cast<const float(*)[4]>(&acc[4 * w]);
      const float z[4] = {mulRn(from[0], scale.v), mulRn(from[1], scale.v), mulRn(from[2], scale.v),
                          mulRn(from[3], scale.v)};
      if constexpr (P == CodecPath::kStochastic) {
        codes[w] = encodeStochastic4<F>(z, p.rounding_key, p.rounding_first + first + 4 * w);
      } else {
        codes[w] = encode4<F, P>(z);
      }
      if (special) codes[w] = markNonFinite<F>(codes[w], from, p.overflow_bits);
    }
    *reinterpret_cast<uint4*>(packet + first) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    if (first + kThreadElements >= p.elements) {
      padScales(scales, p.scale, (p.elements + (1u << p.block_log2) - 1) >> p.block_log2);
    }
  }

  template <DataType T>
  static __device__ __forceinline__ void toElements(const ReduceParams& p) {
    constexpr uint32_t kR = kRows<T>;
    const uint64_t tile_start = uint64_t{blockIdx.x} * kTile;
    const uint64_t first = tile_start + threadIdx.x * kThreadElements;
    const uint32_t valid =
        first < p.elements ? static_cast<uint32_t>(least(kThreadElements, p.elements - first)) : 0;
    float acc[kThreadElements];
    sum(p, first, valid, acc);

    uint32_t word[kR][4];
#pragma unroll
    for (uint32_t i = 0; i < 4 * kR; ++i) word[i / 4][i % 4] = storeWord<T>(acc + i * (kVector<T> / 4));
    uint8_t* out = static_cast<uint8_t*>(p.out);
    if (p.elements - tile_start >= kTile && aligned16(out)) {
      // Lanes swap vectors in pairs, so that each store of a pair is one full sector: the even lane writes
      // the even vectors of both, the odd lane the odd ones.
      const bool odd = threadIdx.x % 2 != 0;
      const uint64_t pair = first - (odd ? kThreadElements : 0);
#pragma unroll
      for (uint32_t r = 0; r < kR; r += 2) {
        uint4 mine;
        uint4 theirs;
        uint32_t* const m[4] = {&mine.x, &mine.y, &mine.z, &mine.w};
        uint32_t* const o[4] = {&theirs.x, &theirs.y, &theirs.z, &theirs.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          *m[i] = odd ? word[r + 1][i] : word[r][i];
          *o[i] = __shfl_xor_sync(0xffffffffu, odd ? word[r][i] : word[r + 1][i], 1);
        }
        const uint64_t vector = (r + (odd ? 1 : 0)) * kVector<T>;
        const uint64_t even_at = pair + vector;
        const uint64_t odd_at = even_at + kThreadElements;
        *reinterpret_cast<uint4*>(out + even_at * dataTypeBytes(T)) = odd ? theirs : mine;
        *reinterpret_cast<uint4*>(out + odd_at * dataTypeBytes(T)) = odd ? mine : theirs;
      }
      return;
    }
#pragma unroll
    for (uint32_t r = 0; r < kR; ++r) {
      const uint32_t before = r * kVector<T>;
      const uint32_t count = valid > before ? valid - before : 0;
      scatterVector<T>(out, first + before, count < kVector<T> ? count : kVector<T>, word[r]);
    }
  }
};

}  // namespace halfwire::cuda
