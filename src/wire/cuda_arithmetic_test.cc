// The arithmetic of the CUDA kernels' software path, compiled for the host, against the scalar reference.
#include "wire/cuda_arithmetic.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "wire/codec.h"
#include "wire/reference.h"

namespace halfwire {
namespace {

constexpr CodecPath kPath = CodecPath::kSoftware;

// One block as the quantize kernel does it.
template <ElementFormat F>
void quantizeBlock(ScaleFormat scale_format, DataType type, const float* y, uint32_t n, uint8_t* codes,
                   uint8_t* scale) {
  const uint32_t overflow = overflowBits(type);
  uint32_t amax = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = cuda::bitsOf(y[i]) & 0x7fffffffu;
    if (magnitude < overflow) amax = std::max(amax, magnitude);
  }
  const cuda::BlockScale made = cuda::blockScale<F>(scale_format, amax);
  std::memcpy(scale, &made.stored, scaleBytes(scale_format));
  for (uint32_t i = 0; i < n; i += 4) {
    float from[4] = {};
    std::memcpy(from, y + i, std::min(4u, n - i) * sizeof(float));
    float z[4];
    for (int k = 0; k < 4; ++k) z[k] = cuda::mulRn(from[k], made.v);
    const uint32_t word = cuda::markNonFinite<F>(cuda::encode4<F, kPath>(z), from, overflow);
    std::memcpy(codes + i, &word, std::min(4u, n - i));
  }
}

template <ElementFormat F>
void compareQuantize(DataType type, const std::vector<float>& y) {
  for (const ScaleFormat scale_format : {ScaleFormat::kFp32, ScaleFormat::kE8M0}) {
    const WireFormat format{F, scale_format, 256};
    for (size_t start = 0; start < y.size(); start += 256) {
      const auto n = static_cast<uint32_t>(std::min<size_t>(256, y.size() - start));
      uint8_t expected[260] = {};
      uint8_t got[260] = {};
      reference::quantizeFloats(format, type, y.data() + start, n, expected, expected + 256);
      quantizeBlock<F>(scale_format, type, y.data() + start, n, got, got + 256);
      ASSERT_EQ(std::memcmp(expected, got, sizeof(got)), 0)
          << "format " << static_cast<int>(F) << " scale " << static_cast<int>(scale_format) << " type "
          << static_cast<int>(type) << " at " << start;
    }
  }
}

template <ElementFormat F, DataType T>
void compareDequantize(const std::vector<float>& scales) {
  for (const float scale : scales) {
    uint8_t codes[256];
    for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
    uint8_t expected[1024];
    uint8_t got[1024];
    const WireFormat format{F, ScaleFormat::kFp32, 256};
    reference::dequantizeBlock(format, T, codes, reinterpret_cast<const uint8_t*>(&scale), 256, expected);
    const bool within = cuda::withinBound<F>(scale, typeMax(T));
    uint8_t* out = got;
    for (int i = 0; i < 256; i += 4) {
      uint32_t word;
      std::memcpy(&word, codes + i, 4);
      float t[4];
      cuda::decodeScaled4<F, kPath>(word, scale, typeMax(T), within && cuda::nonFiniteBytes<F>(word) == 0, t);
      for (int k = 0; k < 4; k += static_cast<int>(4 / dataTypeBytes(T))) {
        const uint32_t stored = cuda::storeWord<T>(t + k);
        std::memcpy(out, &stored, 4);
        out += 4;
      }
    }
    ASSERT_EQ(std::memcmp(expected, got, 256 * dataTypeBytes(T)), 0)
        << "format " << static_cast<int>(F) << " type " << static_cast<int>(T) << " scale " << scale;
  }
}

float floatOfBits(uint32_t bits) { return std::bit_cast<float>(bits); }

// Every exponent, both signs, ties and their neighbours, specials.
std::vector<float> hardFloats() {
  std::vector<float> out = {0.0f,
                            -0.0f,
                            1e-45f,
                            -1e-45f,
                            floatOfBits(0x7f7fffffu),
                            floatOfBits(0xff7fffffu),
                            floatOfBits(0x7f800000u),
                            floatOfBits(0xff800000u),
                            floatOfBits(0x7fc00000u),
                            floatOfBits(0x7f800001u),
                            floatOfBits(0xffffffffu),
                            65504.0f,
                            65519.9f,
                            65520.0f,
                            floatOfBits(0x7f7f0000u),
                            floatOfBits(0x7f7f7fffu),
                            floatOfBits(0x7f7f8000u)};
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t mantissa : {0u, 1u, 0x080000u, 0x0fffffu, 0x100000u, 0x100001u, 0x180000u, 0x2fffffu,
                                    0x300000u, 0x500000u, 0x600000u, 0x700001u, 0x7fffffu}) {
      out.push_back(floatOfBits((exponent << 23) | mantissa));
      out.push_back(floatOfBits(0x80000000u | (exponent << 23) | mantissa));
    }
  }
  return out;
}

template <ElementFormat F>
void compareAllQuantize() {
  std::mt19937 random(7);
  for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32}) {
    compareQuantize<F>(type, hardFloats());
    std::vector<float> y;
    for (uint32_t i = 0; i < 65536; ++i) {
      y.push_back(type == DataType::kFp16 ? fp16ToFloat(static_cast<uint16_t>(i))
                                          : bf16ToFloat(static_cast<uint16_t>(i)));
    }
    compareQuantize<F>(type, y);
    std::shuffle(y.begin(), y.end(), random);
    compareQuantize<F>(type, y);
    y.clear();
    for (int i = 0; i < 1 << 18; ++i) y.push_back(floatOfBits(static_cast<uint32_t>(random())));
    compareQuantize<F>(type, y);
    // Blocks of one magnitude, over all magnitudes: dense in codes and in ties.
    y.clear();
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (int e = -149; e < 128; ++e) {
      for (int i = 0; i < 1024; ++i) y.push_back(std::ldexp(uniform(random), e));
      for (int i = 0; i < 256; ++i)
        y.push_back(std::ldexp(static_cast<float>(static_cast<int>(random() % 1025) - 512) / 512.0f, e));
    }
    compareQuantize<F>(type, y);
  }
}

TEST(CudaArithmeticTest, QuantizeE4M3) { compareAllQuantize<ElementFormat::kE4M3>(); }
TEST(CudaArithmeticTest, QuantizeE5M2) { compareAllQuantize<ElementFormat::kE5M2>(); }
TEST(CudaArithmeticTest, QuantizeInt8) { compareAllQuantize<ElementFormat::kInt8>(); }
TEST(CudaArithmeticTest, QuantizeE3M4) { compareAllQuantize<ElementFormat::kE3M4>(); }

template <ElementFormat F>
void compareAllDequantize() {
  std::vector<float> scales = {0x1p-126f, 1e-45f, 0.0f, 1.0f, 0x1p120f, 0x1p127f, floatOfBits(0x7f7fffffu),
                               146.0f,    150.3f};
  std::mt19937 random(11);
  for (int i = 0; i < 20000; ++i)
    scales.push_back(floatOfBits(static_cast<uint32_t>(random()) % 0x7f800000u));
  compareDequantize<F, DataType::kBf16>(scales);
  compareDequantize<F, DataType::kFp16>(scales);
  compareDequantize<F, DataType::kFp32>(scales);
}

template <ElementFormat F>
void compareAnyNonFinite() {
  std::mt19937 random(5);
  for (int i = 0; i < 1 << 20; ++i) {
    uint32_t word = static_cast<uint32_t>(random());
    if (i % 4 == 1) word = (word & 0x01010101u) | 0x80808080u;
    if (i % 4 == 2) word |= 0x7c7c7c7cu;
    ASSERT_EQ(cuda::anyNonFinite<F>(word) != 0, cuda::nonFiniteBytes<F>(word) != 0) << word;
  }
}

TEST(CudaArithmeticTest, AnyNonFiniteAgreesWithWhich) {
  compareAnyNonFinite<ElementFormat::kE4M3>();
  compareAnyNonFinite<ElementFormat::kE5M2>();
  compareAnyNonFinite<ElementFormat::kInt8>();
  compareAnyNonFinite<ElementFormat::kE3M4>();
}

TEST(CudaArithmeticTest, DequantizeE4M3) { compareAllDequantize<ElementFormat::kE4M3>(); }
TEST(CudaArithmeticTest, DequantizeE5M2) { compareAllDequantize<ElementFormat::kE5M2>(); }
TEST(CudaArithmeticTest, DequantizeInt8) { compareAllDequantize<ElementFormat::kInt8>(); }
TEST(CudaArithmeticTest, DequantizeE3M4) { compareAllDequantize<ElementFormat::kE3M4>(); }

template <ElementFormat F>
void compareQuotient() {
  // Rounding of the quotient depends on the mantissa alone away from the ends of the exponent range.
  for (const uint32_t exponent : {1u, 68u, 127u}) {
    for (uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
      const float amax = floatOfBits((exponent << 23) | mantissa);
      const float expected = std::max(amax / elementMax(F), kMinScale);
      ASSERT_EQ(cuda::bitsOf(std::max(cuda::quotientByMax<F>(amax), kMinScale)), cuda::bitsOf(expected))
          << amax;
    }
  }
  for (uint32_t bits = 0; bits < 0x7f800000u; bits += 4099) {  // every exponent, denormals
    const float amax = floatOfBits(bits);
    const float expected = std::max(amax / elementMax(F), kMinScale);
    ASSERT_EQ(cuda::bitsOf(std::max(cuda::quotientByMax<F>(amax), kMinScale)), cuda::bitsOf(expected))
        << amax;
  }
}

TEST(CudaArithmeticTest, QuotientIsCorrectlyRoundedForEveryMantissa) {
  compareQuotient<ElementFormat::kE4M3>();
  compareQuotient<ElementFormat::kE5M2>();
  compareQuotient<ElementFormat::kInt8>();
  compareQuotient<ElementFormat::kE3M4>();
}

}  // namespace
}  // namespace halfwire
