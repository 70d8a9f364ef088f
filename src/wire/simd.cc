// The wire format in SIMD, compiled once for each instruction set. Every function equals the reference bit
// for bit; blocks outside its fast path (a value that is not finite, a scale whose products must be clamped)
// and the short block at the end of a packet go to the reference.
#include "wire/simd.h"

#include <cpuid.h>
#include <xmmintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "wire/constants.h"
#include "wire/convert.h"
#include "wire/fp_environment.h"
#include "wire/layout.h"
#include "wire/reference.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "wire/simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace halfwire::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace hn = hwy::HWY_NAMESPACE;

// Blocks handled together: their amax first, then all their scales in a few vector divisions, then their
// codes. One block at a time would wait for its own division.
constexpr uint32_t kTile = 16;
constexpr uint32_t kPacketGroup = 16;  // packets summed in registers before the sum is put down

using F32 = hn::CappedTag<float, 16>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Repartition<uint16_t, F32>;
using I16 = hn::RebindToSigned<U16>;
using U16Half = hn::Half<U16>;
using F16Half = hn::Rebind<hwy::float16_t, F32>;
using U8 = hn::Repartition<uint8_t, F32>;
using U8Half = hn::Half<U8>;
using VF32 = hn::Vec<F32>;
using VU32 = hn::Vec<U32>;
using VU16 = hn::Vec<U16>;

constexpr size_t kLanes = hn::MaxLanes(F32());
constexpr size_t kPair = 2 * kLanes;  // elements of two vectors of fp32, of one vector of 16-bit values
constexpr F32 f32;
constexpr U32 u32;
constexpr I32 i32;
constexpr U16 u16;
constexpr I16 i16;
constexpr U8 u8;

struct Pair {
  VF32 lo, hi;
};

HWY_INLINE VF32 magnitude(VF32 v) {
  return hn::BitCast(f32, hn::And(hn::BitCast(u32, v), hn::Set(u32, 0x7fffffffu)));
}

HWY_INLINE uint32_t maxOfLanes16(VU16 v) {
#if HWY_TARGET <= HWY_AVX3
  const hn::Half<U16> half;
  const hn::Half<decltype(half)> quarter;
  const auto m = hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v));
  return hn::GetLane(hn::MaxOfLanes(hn::FixedTag<uint16_t, 8>(),
                                    hn::Max(hn::LowerHalf(quarter, m), hn::UpperHalf(quarter, m))));
#elif HWY_TARGET == HWY_AVX2
  const hn::Half<U16> half;
  return hn::GetLane(
      hn::MaxOfLanes(hn::FixedTag<uint16_t, 8>(), hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v))));
#else
  return hn::GetLane(hn::MaxOfLanes(u16, v));
#endif
}

// ---- Sources: kPair elements as two fp32 vectors. Which element is where differs, for speed; `join` undoes
// it.

template <DataType T>
struct Source;

// 16 bits to a lane: even elements in one vector, odd ones in the other.
template <>
struct Source<DataType::kBf16> {
  VU16 bits;

  explicit HWY_INLINE Source(const uint8_t* in)
      : bits(hn::LoadU(u16, reinterpret_cast<const uint16_t*>(in))) {}

  static HWY_INLINE Pair widen(VU16 w) {
    const VU32 pairs = hn::BitCast(u32, w);
    return {hn::BitCast(f32, hn::ShiftLeft<16>(pairs)),
            hn::BitCast(f32, hn::And(pairs, hn::Set(u32, 0xffff0000u)))};
  }
  HWY_INLINE Pair values() const { return widen(bits); }
  HWY_INLINE Pair magnitudes() const { return widen(hn::And(bits, hn::Set(u16, 0x7fff))); }
  HWY_INLINE VU16 signs() const { return bits; }  // in the top bit of each lane

  // The low halves of the lanes of `lo` and `hi` in element order.
  static HWY_INLINE VU16 join(VU32 lo, VU32 hi) {
    return hn::OddEven(hn::BitCast(u16, hn::ShiftLeft<16>(hi)), hn::BitCast(u16, lo));
  }

  static HWY_INLINE uint32_t amaxBits(const uint8_t* in, uint32_t block) {
    return maxOfLanes16(maxMagnitude16(in, block)) << 16;
  }
  static HWY_INLINE VU16 maxMagnitude16(const uint8_t* in, uint32_t block) {
    const auto* p = reinterpret_cast<const uint16_t*>(in);
    const VU16 mask = hn::Set(u16, 0x7fff);
    VU16 m = hn::And(hn::LoadU(u16, p), mask);
    for (uint32_t i = kPair; i < block; i += kPair) m = hn::Max(m, hn::And(hn::LoadU(u16, p + i), mask));
    return m;
  }
};

template <>
struct Source<DataType::kFp16> {
  VU16 bits;

  explicit HWY_INLINE Source(const uint8_t* in)
      : bits(hn::LoadU(u16, reinterpret_cast<const uint16_t*>(in))) {}

  static HWY_INLINE Pair widen(VU16 w) {
    const U16Half half;
    const F16Half f16;
    return {hn::PromoteTo(f32, hn::BitCast(f16, hn::LowerHalf(half, w))),
            hn::PromoteTo(f32, hn::BitCast(f16, hn::UpperHalf(half, w)))};
  }
  HWY_INLINE Pair values() const { return widen(bits); }
  HWY_INLINE Pair magnitudes() const { return widen(hn::And(bits, hn::Set(u16, 0x7fff))); }
  HWY_INLINE VU16 signs() const { return bits; }
  static HWY_INLINE VU16 join(VU32 lo, VU32 hi) {
    return hn::ConcatEven(u16, hn::BitCast(u16, hi), hn::BitCast(u16, lo));
  }
  static HWY_INLINE uint32_t amaxBits(const uint8_t* in, uint32_t block) {
    const uint32_t bits = maxOfLanes16(Source<DataType::kBf16>::maxMagnitude16(in, block));
    return std::bit_cast<uint32_t>(fp16ToFloat(static_cast<uint16_t>(bits)));
  }
};

template <>
struct Source<DataType::kFp32> {
  VF32 lo, hi;

  explicit HWY_INLINE Source(const uint8_t* in)
      : lo(hn::LoadU(f32, reinterpret_cast<const float*>(in))),
        hi(hn::LoadU(f32, reinterpret_cast<const float*>(in) + kLanes)) {}

  HWY_INLINE Pair values() const { return {lo, hi}; }
  HWY_INLINE Pair magnitudes() const { return {magnitude(lo), magnitude(hi)}; }
  HWY_INLINE VU16 signs() const { return hn::ConcatOdd(u16, hn::BitCast(u16, hi), hn::BitCast(u16, lo)); }
  static HWY_INLINE VU16 join(VU32 a, VU32 b) { return Source<DataType::kFp16>::join(a, b); }
  static HWY_INLINE uint32_t amaxBits(const uint8_t* in, uint32_t block) {
    const auto* p = reinterpret_cast<const float*>(in);
    // Magnitudes compared as signed integers: NaN comes out largest, whatever the operand order.
    const auto load = [p](size_t i) HWY_ATTR { return hn::BitCast(i32, magnitude(hn::LoadU(f32, p + i))); };
    auto m0 = load(0), m1 = load(kLanes);
    for (uint32_t i = kPair; i < block; i += kPair) {
      m0 = hn::Max(m0, load(i));
      m1 = hn::Max(m1, load(i + kLanes));
    }
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(i32, hn::Max(m0, m1))));
  }
};

// ---- Elements: fp32 to codes and back.

// Adding 2^(23-k) times the power of two below |z| (at least the smallest normal one) rounds |z| to k
// mantissa bits, ties to even, into the low bits of the sum; the exponent goes on top. Exact whether or not
// MulAdd is fused, for the product is a power of two.
template <int kMantissa, int kBias>
HWY_INLINE VU32 roundToFloat8(VF32 z) {
  constexpr uint32_t kSmallest = 128 - kBias;  // fp32's exponent field of the smallest normal number
  const VU32 exponent = hn::And(hn::BitCast(u32, z), hn::Set(u32, 0x7f800000u));
  const auto raised =
      hn::Max(hn::BitCast(i32, exponent), hn::Set(i32, static_cast<int32_t>(kSmallest << 23)));
  const VF32 sum =
      hn::MulAdd(hn::BitCast(f32, raised), hn::Set(f32, static_cast<float>(1 << (23 - kMantissa))), z);
  return hn::Add(hn::BitCast(u32, sum), hn::ShiftRight<23 - kMantissa>(hn::BitCast(u32, raised)));
}

template <ElementFormat E>
struct Element;

template <int kMantissa, int kBias>
struct Float8 {
  // Codes of kPair elements in the low bytes of the lanes; the high bytes are left over.
  template <class S>
  static HWY_INLINE VU16 encode(const S& source, VF32 inverse) {
    const Pair y = source.magnitudes();
    const VU16 code = S::join(roundToFloat8<kMantissa, kBias>(hn::Mul(y.lo, inverse)),
                              roundToFloat8<kMantissa, kBias>(hn::Mul(y.hi, inverse)));
    const VU16 sign = hn::And(hn::ShiftRight<8>(source.signs()), hn::Set(u16, 0x80));
    return hn::Or(hn::Sub(code, hn::Set(u16, (128 - kBias) << kMantissa)), sign);
  }
};

// The float formats are the upper bits of fp16, E4M3 and E3M4 after a shift that widens their exponents.
template <>
struct Element<ElementFormat::kE4M3> : Float8<3, 7> {
  static constexpr int kMantissaBits = 3;
  static constexpr float kUnit = 256.0f;       // `decode` gives the value over this
  static constexpr float kSmallest = 0x1p-9f;  // the smallest magnitude above zero
  static constexpr uint8_t kNonFinite =
      0x7f;  // the smallest mark (hasNonFinite) of a code that is not finite
  // fp16 from lanes that hold the code in their upper byte and 0 in the lower.
  static HWY_INLINE VU16 toFp16(VU16 shifted) {
    return hn::And(hn::BitCast(u16, hn::ShiftRight<1>(hn::BitCast(i16, shifted))), hn::Set(u16, 0xbf80));
  }
};

template <>
struct Element<ElementFormat::kE5M2> : Float8<2, 15> {
  static constexpr int kMantissaBits = 2;
  static constexpr float kUnit = 1.0f;
  static constexpr float kSmallest = 0x1p-16f;
  static constexpr uint8_t kNonFinite = 0x7c;
  static HWY_INLINE VU16 toFp16(VU16 shifted) { return shifted; }
};

template <>
struct Element<ElementFormat::kE3M4> : Float8<4, 3> {
  static constexpr float kUnit = 1.0f;  // times 4096 a scale that the format allows could overflow
  static constexpr uint8_t kNonFinite = 0x7f;
  static HWY_INLINE VU16 toFp16(VU16 shifted) {
    return hn::And(hn::BitCast(u16, hn::ShiftRight<2>(hn::BitCast(i16, shifted))), hn::Set(u16, 0x9fc0));
  }
};

template <>
struct Element<ElementFormat::kInt8> {
  static constexpr float kUnit = 1.0f;
  static constexpr uint8_t kNonFinite = 0xff;
  template <class S>
  static HWY_INLINE VU16 encode(const S& source, VF32 inverse) {
    const Pair y = source.values();
    return S::join(hn::BitCast(u32, hn::NearestInt(hn::Mul(y.lo, inverse))),
                   hn::BitCast(u32, hn::NearestInt(hn::Mul(y.hi, inverse))));
  }
};

#if HWY_TARGET <= HWY_AVX3
constexpr size_t kGroupVectors = 2;  // 32 elements, the smallest block
#else
constexpr size_t kGroupVectors = 4;
#endif
constexpr size_t kGroup = kGroupVectors * kLanes;

// kGroup elements in order.
struct Group {
  VF32 v[kGroupVectors];
};

// The values of kGroup codes over Element::kUnit. What it makes of codes that are not finite does not matter.
template <ElementFormat E>
HWY_INLINE Group decode(const uint8_t* codes) {
  Group g;
  if constexpr (E == ElementFormat::kInt8) {
    const hn::Rebind<int8_t, F32> quarter;
    const auto* p = reinterpret_cast<const int8_t*>(codes);
    for (size_t i = 0; i < kGroupVectors; ++i) {
      g.v[i] = hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(quarter, p + i * kLanes)));
    }
  } else {
#if HWY_TARGET == HWY_AVX2
    // Interleaving stays within 128 bits, which suits a conversion that takes 128 bits at a time.
    const auto c = hn::LoadU(u8, codes);
    const auto zero = hn::Zero(u8);
    const Pair a = Source<DataType::kFp16>::widen(
        Element<E>::toFp16(hn::BitCast(u16, hn::InterleaveLower(u8, zero, c))));
    const Pair b = Source<DataType::kFp16>::widen(
        Element<E>::toFp16(hn::BitCast(u16, hn::InterleaveUpper(u8, zero, c))));
    g = {{a.lo, b.lo, a.hi, b.hi}};
#else
    for (size_t i = 0; i < kGroupVectors; i += 2) {
      const VU16 c = hn::PromoteTo(u16, hn::LoadU(U8Half(), codes + i * kLanes));
      const Pair a = Source<DataType::kFp16>::widen(Element<E>::toFp16(hn::ShiftLeft<8>(c)));
      g.v[i] = a.lo;
      g.v[i + 1] = a.hi;
    }
#endif
    if constexpr (E == ElementFormat::kE3M4) {
      for (VF32& v : g.v) v = hn::Mul(v, hn::Set(f32, 4096.0f));
    }
  }
  return g;
}

// Whether any of `count` codes (a multiple of 32) is not finite.
template <ElementFormat E>
HWY_INLINE bool hasNonFinite(const uint8_t* codes, uint32_t count) {
  using D = hn::CappedTag<uint8_t, 32>;
  constexpr D d;
  const auto mark = [&](uint32_t i) HWY_ATTR {
    const auto mask = hn::Set(d, 0x7f);
    const auto c = hn::LoadU(d, codes + i);
    return E == ElementFormat::kInt8 ? hn::Xor(c, mask) : hn::And(c, mask);
  };
  auto m0 = mark(0), m1 = mark(32 - hn::MaxLanes(d));
  for (uint32_t i = 0; i < count; i += 32) {
    m0 = hn::Max(m0, mark(i));
    if constexpr (hn::MaxLanes(D()) == 16) m1 = hn::Max(m1, mark(i + 16));
  }
  const auto m = hn::Max(m0, m1);
  return !hn::AllFalse(d, hn::Eq(hn::Max(m, hn::Set(d, Element<E>::kNonFinite)), m));
}

// ---- Results: fp32 in element order to the data type, nearest even; no value is NaN.

#if HWY_TARGET > HWY_AVX2
// Without F16C. Adding 1/2 leaves |v| in units of 2^-24, those of fp16's subnormals.
HWY_INLINE VU32 roundToFp16(VF32 v) {
  const VU32 bits = hn::BitCast(u32, v);
  const VU32 abs = hn::And(bits, hn::Set(u32, 0x7fffffffu));
  const VU32 rebased = hn::Sub(abs, hn::Set(u32, 112u << 23));
  const VU32 odd = hn::And(hn::ShiftRight<13>(rebased), hn::Set(u32, 1));
  const VU32 normal = hn::ShiftRight<13>(hn::Add(rebased, hn::Add(odd, hn::Set(u32, 0xfff))));
  const VU32 subnormal = hn::Sub(hn::BitCast(u32, hn::Add(hn::BitCast(f32, abs), hn::Set(f32, 0.5f))),
                                 hn::Set(u32, std::bit_cast<uint32_t>(0.5f)));
  const auto a = hn::BitCast(i32, abs);
  VU32 r = hn::IfThenElse(hn::RebindMask(u32, hn::Lt(a, hn::Set(i32, 0x38800000))), subnormal, normal);
  r = hn::IfThenElse(hn::RebindMask(u32, hn::Gt(a, hn::Set(i32, 0x477fefff))), hn::Set(u32, 0x7c00), r);
  return hn::Or(r, hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 0x8000)));
}
#endif

template <DataType T>
HWY_INLINE void store(Pair v, uint8_t* out) {
  if constexpr (T == DataType::kFp32) {
    hn::StoreU(v.lo, f32, reinterpret_cast<float*>(out));
    hn::StoreU(v.hi, f32, reinterpret_cast<float*>(out) + kLanes);
  } else if constexpr (T == DataType::kFp16) {
    auto* p = reinterpret_cast<uint16_t*>(out);
#if HWY_TARGET <= HWY_AVX2
    const F16Half f16;
    const U16Half half;
    hn::StoreU(hn::BitCast(half, hn::DemoteTo(f16, v.lo)), half, p);
    hn::StoreU(hn::BitCast(half, hn::DemoteTo(f16, v.hi)), half, p + kLanes);
#else
    hn::StoreU(Source<DataType::kFp16>::join(roundToFp16(v.lo), roundToFp16(v.hi)), u16, p);
#endif
  } else {
    const auto round = [](VF32 x) HWY_ATTR {
      const VU32 bits = hn::BitCast(u32, x);
      const VU32 odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
      return hn::BitCast(u16, hn::Add(bits, hn::Add(odd, hn::Set(u32, 0x7fff))));
    };
    hn::StoreU(hn::ConcatOdd(u16, round(v.hi), round(v.lo)), u16, reinterpret_cast<uint16_t*>(out));
  }
}

// ---- Jobs.

// The arithmetic mode while a job runs. With subnormals flushed, data full of them costs nothing extra; the
// mode is set only around functions that are not inlined.
class Mode {
 public:
  void set(uint32_t mode) {
    if (mode == current_) return;
    _mm_setcsr(mode);
    current_ = mode;
  }

 private:
  uint32_t current_ = kIeeeArithmetic;
};

// What is the same for all tiles of a job that quantizes.
struct Quantizer {
  WireFormat format;
  DataType type;
  Mode mode;
};

struct alignas(64) TileScales {
  uint32_t amax[kTile] = {};  // bits; 0 for blocks that are left to the reference
  uint32_t scale[kTile];      // bits of the fp32 scale, or the e8m0 byte
  float inverse[kTile];
};

// Fills in the scales from the maxima. True if flushing subnormals could change a code: a subnormal element
// is below 2^-126, which times 2^109 is half of the smallest code of any format.
HWY_INLINE bool makeScales(const WireFormat& format, uint32_t blocks, TileScales& tile) {
  const VF32 divisor = hn::Set(f32, elementMax(format.element));
  auto small = hn::MaskFromVec(hn::Zero(f32));
  for (uint32_t i = 0; i < blocks; i += kLanes) {
    const VU32 amax = hn::Load(u32, tile.amax + i);
    const VF32 r = hn::Div(hn::BitCast(f32, amax), divisor);
    VF32 inverse;
    if (format.scale == ScaleFormat::kFp32) {
      const VF32 scale = hn::Max(r, hn::Set(f32, kMinScale));
      inverse = hn::Div(hn::Set(f32, 1.0f), scale);
      hn::Store(hn::BitCast(u32, scale), u32, tile.scale + i);
    } else {
      const VU32 up = hn::ShiftRight<23>(hn::Add(hn::BitCast(u32, r), hn::Set(u32, 0x7fffff)));
      const auto exponent = hn::Max(hn::BitCast(i32, up), hn::Set(i32, 1));
      inverse = hn::BitCast(f32, hn::ShiftLeft<23>(hn::Sub(hn::Set(i32, 254), exponent)));
      hn::Store(hn::BitCast(u32, exponent), u32, tile.scale + i);
    }
    hn::Store(inverse, f32, tile.inverse + i);
    const auto nonzero = hn::Gt(hn::BitCast(i32, amax), hn::Zero(i32));
    small = hn::Or(small, hn::And(hn::Gt(inverse, hn::Set(f32, 0x1p109f)), hn::RebindMask(f32, nonzero)));
  }
  return !hn::AllFalse(f32, small);
}

HWY_INLINE void putScales(ScaleFormat format, const TileScales& tile, uint32_t blocks, uint8_t* out) {
  if (format == ScaleFormat::kFp32) {
    std::memcpy(out, tile.scale, blocks * 4);
    return;
  }
  for (uint32_t b = 0; b < blocks; ++b) out[b] = static_cast<uint8_t>(tile.scale[b]);
}

template <ElementFormat E, DataType S>
HWY_NOINLINE void encodeTile(const uint8_t* in, uint32_t blocks, uint32_t block, const float* inverses,
                             uint8_t* codes) {
  using From = Source<S>;
  constexpr size_t kStep = kPair * dataTypeBytes(S);
  for (uint32_t b = 0; b < blocks; ++b) {
    const VF32 inverse = hn::Set(f32, inverses[b]);
#if HWY_TARGET <= HWY_AVX3
    for (uint32_t i = 0; i < block; i += kPair, in += kStep, codes += kPair) {
      const U8Half half;
      hn::StoreU(hn::TruncateTo(half, Element<E>::encode(From(in), inverse)), half, codes);
    }
#else
    for (uint32_t i = 0; i < block; i += 2 * kPair, in += 2 * kStep, codes += 2 * kPair) {
      const VU16 first = Element<E>::encode(From(in), inverse);
      const VU16 second = Element<E>::encode(From(in + kStep), inverse);
      hn::StoreU(hn::ConcatEven(u8, hn::BitCast(u8, second), hn::BitCast(u8, first)), u8, codes);
    }
#endif
  }
}

// Quantizes up to kTile whole blocks of type S. S is the quantizer's type, or fp32 holding values meant for
// it.
template <ElementFormat E, DataType S>
HWY_NOINLINE void quantizeTile(Quantizer& q, const uint8_t* in, uint32_t blocks, uint8_t* codes,
                               uint8_t* scales) {
  const uint32_t block = q.format.block;
  const size_t stride = block * dataTypeBytes(S);
  const uint32_t overflow = overflowBits(q.type);
  TileScales tile;
  uint32_t left = 0;
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t amax = Source<S>::amaxBits(in + b * stride, block);
    if (HWY_LIKELY(amax < overflow)) {
      tile.amax[b] = amax;
    } else {
      left |= 1u << b;
    }
  }
  const bool small = makeScales(q.format, blocks, tile);
  putScales(q.format.scale, tile, blocks, scales);
  q.mode.set(small ? kIeeeArithmetic : kFlushSubnormals);
  encodeTile<E, S>(in, blocks, block, tile.inverse, codes);
  if (HWY_LIKELY(left == 0)) return;
  q.mode.set(kIeeeArithmetic);
  for (uint32_t b = 0; b < blocks; ++b) {
    if ((left >> b & 1) == 0) continue;
    uint8_t* const scale = scales + b * scaleBytes(q.format.scale);
    const uint8_t* const from = in + b * stride;
    if constexpr (S == DataType::kFp32) {
      reference::quantizeFloats(q.format, q.type, reinterpret_cast<const float*>(from), block,
                                codes + b * block, scale);
    } else {
      reference::quantizeBlock(q.format, S, from, block, nullptr, codes + b * block, scale);
    }
  }
}

// fp32 from fp16, also where it is not finite, which Highway's code for processors without F16C leaves out.
HWY_INLINE VF32 widenFp16(hn::Vec<U16Half> bits) {
  const VF32 value = hn::PromoteTo(f32, hn::BitCast(F16Half(), bits));
#if HWY_TARGET > HWY_AVX2
  const VU32 field = hn::Set(u32, 0x7c00);
  const auto special = hn::Eq(hn::And(hn::PromoteTo(u32, bits), field), field);
  return hn::BitCast(f32,
                     hn::Or(hn::BitCast(u32, value), hn::IfThenElseZero(special, hn::Set(u32, 0x7f800000u))));
#else
  return value;
#endif
}

// RN(x * factor) in element order.
template <DataType S>
HWY_NOINLINE void multiply(const uint8_t* in, uint32_t elements, float factor, float* out) {
  const VF32 f = hn::Set(f32, factor);
  const auto load = [in](uint32_t i) HWY_ATTR {
    if constexpr (S == DataType::kFp32) {
      return hn::LoadU(f32, reinterpret_cast<const float*>(in) + i);
    } else {
      const U16Half half;
      const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(in) + i);
      if constexpr (S == DataType::kFp16) return widenFp16(bits);
      if constexpr (S == DataType::kBf16)
        return hn::BitCast(f32, hn::ShiftLeft<16>(hn::PromoteTo(u32, bits)));
    }
  };
  for (uint32_t i = 0; i < elements; i += kLanes) hn::Store(hn::Mul(load(i), f), f32, out + i);
}

template <ElementFormat E, DataType S>
void quantizeSegment(Quantizer& q, const uint8_t* in, uint64_t elements, const float* factor,
                     uint8_t* packet) {
  const uint32_t block = q.format.block;
  const uint64_t whole = elements / block;
  uint8_t* const scales = packet + scaleOffset(q.format, elements);
  const size_t scale_bytes = scaleBytes(q.format.scale);
  alignas(64) float products[kTile * kMaxBlock];
  for (uint64_t b = 0; b < whole; b += kTile) {
    const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(kTile, whole - b));
    const uint8_t* const from = in + b * block * dataTypeBytes(S);
    uint8_t* const codes = packet + b * block;
    if (factor == nullptr) {
      quantizeTile<E, S>(q, from, blocks, codes, scales + b * scale_bytes);
      continue;
    }
    q.mode.set(kIeeeArithmetic);
    multiply<S>(from, blocks * block, *factor, products);
    quantizeTile<E, DataType::kFp32>(q, reinterpret_cast<const uint8_t*>(products), blocks, codes,
                                     scales + b * scale_bytes);
  }
  if (whole * block < elements) {
    q.mode.set(kIeeeArithmetic);
    reference::quantizeBlock(q.format, S, in + whole * block * dataTypeBytes(S),
                             static_cast<uint32_t>(elements - whole * block), factor, packet + whole * block,
                             scales + whole * scale_bytes);
  }
  zeroPadding(q.format, elements, packet);
}

HWY_INLINE float readScale(ScaleFormat format, const uint8_t* scales, uint64_t block) {
  if (format == ScaleFormat::kE8M0) return std::bit_cast<float>(uint32_t{scales[block]} << 23);
  float scale;
  std::memcpy(&scale, scales + 4 * block, 4);
  return scale;
}

#if HWY_TARGET <= HWY_AVX2
using Bytes = hn::FixedTag<uint8_t, 32>;
#else
using Bytes = hn::FixedTag<uint8_t, 16>;
#endif

// Moves the 64-bit quarters so that interleaving the lower and the upper half of each 128 bits gives element
// order.
HWY_INLINE hn::Vec<Bytes> spread(hn::Vec<Bytes> v) {
#if HWY_TARGET <= HWY_AVX2
  return hn::Vec<Bytes>{_mm256_permute4x64_epi64(v.raw, 0xd8)};
#else
  return v;
#endif
}

// Whether the products of one scale fit into a table of 16.
constexpr bool decodesByTable(ElementFormat e) {
  return e == ElementFormat::kE4M3 || e == ElementFormat::kE5M2;
}

// Float8 to bf16 without arithmetic on elements. Below one scale all codes of one mantissa decode to the same
// bf16 mantissa, so the products of codes with exponent field 0 or 1 are worked out and the others add to
// their exponent. Requires that the products of field 1 are normal and none is too large.
template <ElementFormat E>
HWY_INLINE void decodeBlockByTable(const uint8_t* codes, float scale, uint32_t block, uint8_t* out) {
  constexpr int kMantissa = Element<E>::kMantissaBits;
  constexpr uint8_t kImplicit = 1 << kMantissa;
  constexpr Bytes d8;
  constexpr hn::Repartition<uint16_t, Bytes> d16;
  constexpr hn::FixedTag<uint8_t, 16> table;
  alignas(64) uint16_t products[std::max<size_t>(16, kPair)];
  alignas(16) uint8_t low[16], high[16];
  const VF32 unit = hn::Set(f32, scale * Element<E>::kSmallest);
  for (size_t i = 0; i < 16; i += kPair) {
    const auto product = [&](size_t first)
                             HWY_ATTR { return hn::Mul(hn::Iota(f32, static_cast<float>(first)), unit); };
    store<DataType::kBf16>({product(i), product(i + kLanes)}, reinterpret_cast<uint8_t*>(products + i));
  }
  const auto first = hn::Load(table, reinterpret_cast<const uint8_t*>(products));
  const auto second = hn::Load(table, reinterpret_cast<const uint8_t*>(products + 8));
  hn::Store(hn::ConcatEven(table, second, first), table, low);
  hn::Store(hn::ConcatOdd(table, second, first), table, high);
  const auto low_table = hn::LoadDup128(d8, low), high_table = hn::LoadDup128(d8, high);
  const auto zero = hn::Zero(d8);
  for (uint32_t i = 0; i < block; i += hn::MaxLanes(d8)) {
    const auto c = spread(hn::LoadU(d8, codes + i));
    const auto magnitude = hn::And(c, hn::Set(d8, 0x7f));
    const auto mantissa = hn::And(c, hn::Set(d8, kImplicit - 1));
    const auto index = hn::Min(magnitude, hn::Or(mantissa, hn::Set(d8, kImplicit)));
    const auto field = hn::BitCast(d8, hn::ShiftRight<kMantissa>(hn::BitCast(d16, magnitude)));
    const auto raise = hn::SaturatedSub(hn::And(field, hn::Set(d8, 0x7f >> kMantissa)), hn::Set(d8, 1));
    const auto lo = hn::TableLookupBytes(low_table, index);
    const auto hi = hn::Or(hn::TableLookupBytes(high_table, index), hn::AndNot(hn::Set(d8, 0x7f), c));
    const auto put = [&](size_t at, hn::Vec<decltype(d16)> bits, hn::Vec<decltype(d16)> exponent) HWY_ATTR {
      hn::StoreU(hn::Add(bits, hn::ShiftLeft<7>(exponent)), d16, reinterpret_cast<uint16_t*>(out) + at);
    };
    put(i, hn::BitCast(d16, hn::InterleaveLower(d8, lo, hi)),
        hn::BitCast(d16, hn::InterleaveLower(d8, raise, zero)));
    put(i + hn::MaxLanes(d16), hn::BitCast(d16, hn::InterleaveUpper(d8, lo, hi)),
        hn::BitCast(d16, hn::InterleaveUpper(d8, raise, zero)));
  }
}

template <ElementFormat E, DataType T>
HWY_INLINE void decodeBlock(const uint8_t* codes, float scale, uint32_t block, uint8_t* out) {
  if constexpr (T == DataType::kBf16 && decodesByTable(E)) {
    constexpr float kLeast = kMinScale / (Element<E>::kSmallest * (1 << Element<E>::kMantissaBits));
    if (HWY_LIKELY(scale >= kLeast)) return decodeBlockByTable<E>(codes, scale, block, out);
  }
  const VF32 s = hn::Set(f32, scale * Element<E>::kUnit);
  for (uint32_t i = 0; i < block; i += kGroup) {
    const Group q = decode<E>(codes + i);
    for (size_t j = 0; j < kGroupVectors; j += 2) {
      store<T>({hn::Mul(q.v[j], s), hn::Mul(q.v[j + 1], s)}, out + (i + j * kLanes) * dataTypeBytes(T));
    }
  }
}

template <ElementFormat E, DataType T>
void dequantizeSegment(const WireFormat& format, const uint8_t* packet, uint64_t elements, uint8_t* out) {
  const uint32_t block = format.block;
  const uint64_t whole = elements / block;
  const uint8_t* const scales = packet + scaleOffset(format, elements);
  const size_t scale_bytes = scaleBytes(format.scale);
  const size_t stride = block * dataTypeBytes(T);
  for (uint64_t b = 0; b < whole; ++b) {
    const float s = readScale(format.scale, scales, b);
    const uint8_t* const codes = packet + b * block;
    // False also where the scale is NaN. No product is clamped where the largest one is in range.
    const bool plain = s > 0.0f && s * elementMax(E) <= typeMax(T);
    if (HWY_LIKELY(plain && !hasNonFinite<E>(codes, block))) {
      decodeBlock<E, T>(codes, s, block, out + b * stride);
    } else {
      reference::dequantizeBlock(format, T, codes, scales + b * scale_bytes, block, out + b * stride);
    }
  }
  if (whole * block < elements) {
    reference::dequantizeBlock(format, T, packet + whole * block, scales + whole * scale_bytes,
                               static_cast<uint32_t>(elements - whole * block), out + whole * stride);
  }
}

// Up to kPacketGroup packets at one tile.
struct PacketGroup {
  uint32_t packets = 0;
  bool first = true;  // the sum starts with this group
  const uint8_t* codes[kPacketGroup];
  alignas(64) float scale[kPacketGroup][kTile];  // times the average, times Element::kUnit
};

// Fills in the scales of one packet. Returns a bit for each block whose products may have to be clamped;
// false comparisons catch NaN as well.
template <ElementFormat E>
HWY_INLINE uint32_t scaleTile(ScaleFormat format, const uint8_t* scales, uint32_t blocks, float average,
                              float bound, float* out) {
  if (format == ScaleFormat::kFp32) {
    std::memcpy(out, scales, blocks * 4);
  } else {
    for (uint32_t b = 0; b < blocks; ++b) out[b] = std::bit_cast<float>(uint32_t{scales[b]} << 23);
  }
  for (uint32_t b = blocks; b < kTile; ++b) out[b] = 0.0f;
  uint32_t clamped = 0;
  for (uint32_t b = 0; b < kTile; b += kLanes) {
    const VF32 s = hn::Mul(hn::Load(f32, out + b), hn::Set(f32, average));
    const auto plain = hn::And(hn::Gt(s, hn::Zero(f32)),
                               hn::Le(hn::Mul(s, hn::Set(f32, elementMax(E))), hn::Set(f32, bound)));
    uint8_t bits[8] = {};
    hn::StoreMaskBits(f32, plain, bits);
    uint32_t word;
    std::memcpy(&word, bits, 4);
    clamped |= (~word & ((1u << kLanes) - 1)) << b;
    hn::Store(hn::Mul(s, hn::Set(f32, Element<E>::kUnit)), f32, out + b);
  }
  return clamped & ((1u << blocks) - 1);
}

// Adds the group's packets, in order, to the sums of the blocks whose bit in `left` is clear.
template <ElementFormat E>
HWY_NOINLINE void addTile(const PacketGroup& group, uint32_t blocks, uint32_t block, uint32_t left,
                          float* sums) {
  for (uint32_t b = 0; b < blocks; ++b) {
    if (left >> b & 1) continue;
    for (uint32_t i = b * block; i < (b + 1) * block; i += kGroup) {
      Group sum;
      uint32_t k = 0;
      if (group.first) {
        const VF32 s = hn::Set(f32, group.scale[0][b]);
        sum = decode<E>(group.codes[0] + i);
        for (VF32& v : sum.v) v = hn::Mul(v, s);
        k = 1;
      } else {
        for (size_t j = 0; j < kGroupVectors; ++j) sum.v[j] = hn::Load(f32, sums + i + j * kLanes);
      }
      for (; k < group.packets; ++k) {
        const VF32 s = hn::Set(f32, group.scale[k][b]);
        const Group q = decode<E>(group.codes[k] + i);
        for (size_t j = 0; j < kGroupVectors; ++j) sum.v[j] = hn::Add(sum.v[j], hn::Mul(q.v[j], s));
      }
      for (size_t j = 0; j < kGroupVectors; ++j) hn::Store(sum.v[j], f32, sums + i + j * kLanes);
    }
  }
}

template <DataType T>
HWY_NOINLINE void storeTile(const float* sums, uint32_t elements, uint8_t* out) {
  for (uint32_t i = 0; i < elements; i += kPair) {
    store<T>({hn::Load(f32, sums + i), hn::Load(f32, sums + i + kLanes)}, out + i * dataTypeBytes(T));
  }
}

template <ElementFormat E>
void reduceBlocks(const ReduceJob& job) {
  const WireFormat& format = job.format;
  const uint32_t block = format.block;
  const uint64_t whole = job.elements / block;
  const uint64_t scales_at = scaleOffset(format, job.elements);
  const size_t scale_bytes = scaleBytes(format.scale);
  const float bound = typeMax(job.type) * job.average;
  auto* const out = static_cast<uint8_t*>(job.out);
  Quantizer q{format, job.type, {}};
  alignas(64) float sums[kTile * kMaxBlock];
  PacketGroup group;
  for (uint64_t start = 0; start < whole; start += kTile) {
    const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(kTile, whole - start));
    q.mode.set(kIeeeArithmetic);
    uint32_t left = 0;
    for (uint32_t k0 = 0; k0 < job.packets; k0 += kPacketGroup) {
      group.first = k0 == 0;
      group.packets = std::min(kPacketGroup, job.packets - k0);
      for (uint32_t k = 0; k < group.packets; ++k) {
        const uint8_t* const packet = reducePacket(job, k0 + k);
        group.codes[k] = packet + start * block;
        left |= scaleTile<E>(format.scale, packet + scales_at + start * scale_bytes, blocks, job.average,
                             bound, group.scale[k]);
        if (HWY_LIKELY(!hasNonFinite<E>(group.codes[k], blocks * block))) continue;
        for (uint32_t b = 0; b < blocks; ++b) {
          if (hasNonFinite<E>(group.codes[k] + b * block, block)) left |= 1u << b;
        }
      }
      addTile<E>(group, blocks, block, left, sums);
    }
    for (uint32_t b = 0; left >> b != 0; ++b) {
      if (left >> b & 1) std::memset(sums + b * block, 0, block * sizeof(float));
    }
    if (job.to_packet) {
      quantizeTile<E, DataType::kFp32>(q, reinterpret_cast<const uint8_t*>(sums), blocks, out + start * block,
                                       out + scales_at + start * scale_bytes);
    } else if (job.type == DataType::kBf16) {
      storeTile<DataType::kBf16>(sums, blocks * block, out + start * block * 2);
    } else if (job.type == DataType::kFp16) {
      storeTile<DataType::kFp16>(sums, blocks * block, out + start * block * 2);
    } else {
      storeTile<DataType::kFp32>(sums, blocks * block, out + start * block * 4);
    }
    if (HWY_LIKELY(left == 0)) continue;
    q.mode.set(kIeeeArithmetic);
    for (uint32_t b = 0; b < blocks; ++b) {
      if (left >> b & 1) reference::reduceBlock(job, start + b, block);
    }
  }
  if (whole * block < job.elements) {
    q.mode.set(kIeeeArithmetic);
    reference::reduceBlock(job, whole, static_cast<uint32_t>(job.elements - whole * block));
  }
  if (job.to_packet) zeroPadding(format, job.elements, out);
}

// Calls `body` with the element format (and the data type) as constants.
template <class Body>
HWY_INLINE void withElement(ElementFormat element, const Body& body) {
  switch (element) {
    case ElementFormat::kE4M3:
      return body(std::integral_constant<ElementFormat, ElementFormat::kE4M3>());
    case ElementFormat::kE5M2:
      return body(std::integral_constant<ElementFormat, ElementFormat::kE5M2>());
    case ElementFormat::kInt8:
      return body(std::integral_constant<ElementFormat, ElementFormat::kInt8>());
    case ElementFormat::kE3M4:
      return body(std::integral_constant<ElementFormat, ElementFormat::kE3M4>());
  }
}

template <class Body>
HWY_INLINE void withElementAndType(ElementFormat element, DataType type, const Body& body) {
  withElement(element, [&](auto e) {
    switch (type) {
      case DataType::kBf16:
        return body(e, std::integral_constant<DataType, DataType::kBf16>());
      case DataType::kFp16:
        return body(e, std::integral_constant<DataType, DataType::kFp16>());
      case DataType::kFp32:
        return body(e, std::integral_constant<DataType, DataType::kFp32>());
    }
  });
}

void quantize(const QuantizeJob& job) {
  const float factor = job.factor.present ? reference::factorValue(job.factor, job.type) : 1.0f;
  Quantizer q{job.format, job.type, {}};
  withElementAndType(job.format.element, job.type, [&](auto element, auto type) {
    for (uint32_t s = 0; s < job.segments; ++s) {
      const Segment segment = segmentAt(s, job.in_pitch, job.in_total, job.segment_elements);
      if (segment.elements == 0) continue;
      quantizeSegment<element(), type()>(
          q, static_cast<const uint8_t*>(job.in) + segment.start * dataTypeBytes(job.type), segment.elements,
          job.factor.present ? &factor : nullptr, static_cast<uint8_t*>(job.out) + s * job.out_pitch);
    }
  });
}

void dequantize(const DequantizeJob& job) {
  withElementAndType(job.format.element, job.type, [&](auto element, auto type) {
    for (uint32_t s = 0; s < job.segments; ++s) {
      const Segment segment = segmentAt(s, job.out_pitch, job.out_total, job.segment_elements);
      if (segment.elements == 0) continue;
      dequantizeSegment<element(), type()>(
          job.format, static_cast<const uint8_t*>(job.in) + s * job.in_pitch, segment.elements,
          static_cast<uint8_t*>(job.out) + segment.start * dataTypeBytes(job.type));
    }
  });
}

void reduce(const ReduceJob& job) {
  if (job.packets == 0) return;
  withElement(job.format.element, [&](auto element) { reduceBlocks<element()>(job); });
}

SimdTarget makeTarget() { return {hwy::TargetName(HWY_TARGET), quantize, dequantize, reduce}; }

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace halfwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfwire {
namespace {

// Debian's Highway detects the processor in a shared library, which an LD_PRELOAD library must not need.
struct Processor {
  bool ssse3 = false, sse4 = false, avx2 = false, avx3 = false;
};

Processor detectProcessor() {
  Processor p;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return p;
  const uint32_t ecx1 = ecx;
  uint32_t ebx7 = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) ebx7 = ebx;
  uint32_t xcr0 = 0, xcr0_high = 0;
  if ((ecx1 & bit_OSXSAVE) != 0) __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  const auto all = [](uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; };
  p.ssse3 = all(ecx1, bit_SSSE3);
  p.sse4 = p.ssse3 && all(ecx1, bit_SSE4_1 | bit_SSE4_2 | bit_PCLMUL | bit_AES);
  p.avx2 = p.sse4 && all(xcr0, 0x06) && all(ecx1, bit_AVX | bit_FMA | bit_F16C) &&
           all(ebx7, bit_AVX2 | bit_BMI | bit_BMI2);
  p.avx3 = p.avx2 && all(xcr0, 0xe6) &&
           all(ebx7, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL | bit_AVX512CD);
  return p;
}

struct TargetList {
  std::array<SimdTarget, 4> targets;
  size_t count = 0;
};

TargetList findTargets() {
  const Processor p = detectProcessor();
  TargetList list;
  const auto add = [&](bool supported, SimdTarget target) {
    if (supported) list.targets[list.count++] = target;
  };
#if HWY_TARGETS & HWY_AVX3
  add(p.avx3, N_AVX3::makeTarget());
#endif
#if HWY_TARGETS & HWY_AVX2
  add(p.avx2, N_AVX2::makeTarget());
#endif
#if HWY_TARGETS & HWY_SSE4
  add(p.sse4, N_SSE4::makeTarget());
#endif
#if HWY_TARGETS & HWY_SSSE3
  add(p.ssse3, N_SSSE3::makeTarget());
#endif
  return list;
}

}  // namespace

std::span<const SimdTarget> simdTargets() {
  static const TargetList list = findTargets();
  return {list.targets.data(), list.count};
}

}  // namespace halfwire
#endif  // HWY_ONCE
