#include "hostccl/reduction.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "abi/nccl_types.h"

#define HALFWIRE_INLINE __attribute__((always_inline)) inline

namespace halfwire::hostccl {
namespace {

constexpr size_t kBlock = 1024;  // elements whose accumulators stay in the first-level cache

// ---- element types: Stored in memory, Acc to compute in

struct Bf16 {
  using Stored = uint16_t;
  using Acc = float;
  static HALFWIRE_INLINE float load(uint16_t x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
  static HALFWIRE_INLINE uint16_t store(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
  }
};

struct Fp16 {
  using Stored = uint16_t;
  using Acc = float;
  // The exponent is re-biased by an exact multiplication, which also normalises subnormals.
  static HALFWIRE_INLINE float load(uint16_t x) {
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t finite = std::bit_cast<uint32_t>(scaled);
    const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN
    const uint32_t bits = magnitude >= 0x0f800000u ? special : finite;
    return std::bit_cast<float>(bits | (static_cast<uint32_t>(x & 0x8000u) << 16));
  }
  static HALFWIRE_INLINE uint16_t store(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Subnormal results: adding 0.5 puts the rounding position at the end of the mantissa.
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above round to infinity
    return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fffu : (result | sign));
  }
};

struct Fp32 {
  using Stored = float;
  using Acc = float;
  static HALFWIRE_INLINE float load(float x) { return x; }
  static HALFWIRE_INLINE float store(float x) { return x != x ? std::bit_cast<float>(0x7fffffffu) : x; }
};

struct Fp64 {
  using Stored = double;
  using Acc = double;
  static HALFWIRE_INLINE double load(double x) { return x; }
  static HALFWIRE_INLINE double store(double x) {
    return x != x ? std::bit_cast<double>(uint64_t{0x7fffffffffffffffu}) : x;
  }
};

// Sums and products of signed integers wrap: they are computed unsigned.
template <class T>
struct Integer {
  using Stored = T;
  using Acc = T;
  static HALFWIRE_INLINE T load(T x) { return x; }
  static HALFWIRE_INLINE T store(T x) { return x; }
};

template <class T>
HALFWIRE_INLINE T add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a + b;
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class T>
HALFWIRE_INLINE T multiply(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a * b;
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

template <Operator op, class T>
HALFWIRE_INLINE T combine(T a, T b) {
  switch (op) {
    case Operator::kProd:
      return multiply(a, b);
    case Operator::kMax:
      return b != b ? a : (a > b ? a : b);
    case Operator::kMin:
      return b != b ? a : (a < b ? a : b);
    default:
      return add(a, b);
  }
}

template <class E>
typename E::Acc scalar(uint64_t bits) {
  typename E::Stored stored;
  std::memcpy(&stored, &bits, sizeof(stored));
  return E::load(stored);
}

template <class E, Operator op>
HALFWIRE_INLINE void reduceBlocks(std::span<const void* const> inputs, std::span<const uint64_t> factors,
                                  void* out, size_t count) {
  using Acc = typename E::Acc;
  using Stored = typename E::Stored;
  alignas(64) Acc acc[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = std::min(kBlock, count - start);
    for (size_t k = 0; k < inputs.size(); ++k) {
      const Stored* in = static_cast<const Stored*>(inputs[k]) + start;
      if constexpr (op == Operator::kPreMulSum) {
        const Acc f = scalar<E>(factors[k]);
        if (k == 0) {
          for (size_t i = 0; i < n; ++i) acc[i] = multiply(E::load(in[i]), f);
        } else {
          for (size_t i = 0; i < n; ++i) acc[i] = add(acc[i], multiply(E::load(in[i]), f));
        }
      } else if (k == 0) {
        for (size_t i = 0; i < n; ++i) acc[i] = E::load(in[i]);
      } else {
        for (size_t i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], E::load(in[i]));
      }
    }
    Stored* to = static_cast<Stored*>(out) + start;
    if constexpr (op == Operator::kSumDivide) {
      const auto ranks = static_cast<Acc>(inputs.size());
      for (size_t i = 0; i < n; ++i) to[i] = static_cast<Stored>(acc[i] / ranks);
    } else {
      for (size_t i = 0; i < n; ++i) to[i] = E::store(acc[i]);
    }
  }
}

template <class E, Operator op>
void reducePlain(std::span<const void* const> inputs, std::span<const uint64_t> factors, void* out,
                 size_t count) {
  reduceBlocks<E, op>(inputs, factors, out, count);
}

#if defined(__x86_64__)
template <class E, Operator op>
__attribute__((target("avx2"))) void reduceAvx2(std::span<const void* const> inputs,
                                                std::span<const uint64_t> factors, void* out, size_t count) {
  reduceBlocks<E, op>(inputs, factors, out, count);
}
#endif

template <class E, Operator op>
void dispatch(std::span<const void* const> inputs, std::span<const uint64_t> factors, void* out,
              size_t count) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return reduceAvx2<E, op>(inputs, factors, out, count);
#endif
  reducePlain<E, op>(inputs, factors, out, count);
}

template <class E>
void reduceAs(Operator op, std::span<const void* const> inputs, std::span<const uint64_t> factors, void* out,
              size_t count) {
  switch (op) {
    case Operator::kSum:
      return dispatch<E, Operator::kSum>(inputs, factors, out, count);
    case Operator::kProd:
      return dispatch<E, Operator::kProd>(inputs, factors, out, count);
    case Operator::kMax:
      return dispatch<E, Operator::kMax>(inputs, factors, out, count);
    case Operator::kMin:
      return dispatch<E, Operator::kMin>(inputs, factors, out, count);
    case Operator::kPreMulSum:
      return dispatch<E, Operator::kPreMulSum>(inputs, factors, out, count);
    case Operator::kSumDivide:
      if constexpr (std::is_integral_v<typename E::Acc>) {
        return dispatch<E, Operator::kSumDivide>(inputs, factors, out, count);
      }
  }
}

template <class T>
uint64_t bitsOf(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

}  // namespace

uint64_t averageFactor(ncclDataType_t type, int ranks) {
  const double factor = 1.0 / ranks;
  switch (type) {
    case ncclBfloat16:
      return bitsOf(Bf16::store(static_cast<float>(factor)));
    case ncclFloat16:
      return bitsOf(Fp16::store(static_cast<float>(factor)));
    case ncclFloat32:
      return bitsOf(static_cast<float>(factor));
    default:
      return bitsOf(factor);
  }
}

bool canReduce(ncclDataType_t type) {
  return ncclTypeBytes(type) != 0 && type != ncclFloat8e4m3 && type != ncclFloat8e5m2;
}

void reduce(ncclDataType_t type, Operator op, std::span<const void* const> inputs,
            std::span<const uint64_t> factors, void* out, size_t count) {
  switch (type) {
    case ncclInt8:
      return reduceAs<Integer<int8_t>>(op, inputs, factors, out, count);
    case ncclUint8:
      return reduceAs<Integer<uint8_t>>(op, inputs, factors, out, count);
    case ncclInt32:
      return reduceAs<Integer<int32_t>>(op, inputs, factors, out, count);
    case ncclUint32:
      return reduceAs<Integer<uint32_t>>(op, inputs, factors, out, count);
    case ncclInt64:
      return reduceAs<Integer<int64_t>>(op, inputs, factors, out, count);
    case ncclUint64:
      return reduceAs<Integer<uint64_t>>(op, inputs, factors, out, count);
    case ncclFloat16:
      return reduceAs<Fp16>(op, inputs, factors, out, count);
    case ncclFloat32:
      return reduceAs<Fp32>(op, inputs, factors, out, count);
    case ncclFloat64:
      return reduceAs<Fp64>(op, inputs, factors, out, count);
    case ncclBfloat16:
      return reduceAs<Bf16>(op, inputs, factors, out, count);
    default:
      return;
  }
}

}  // namespace halfwire::hostccl
