#include "soak/values.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "abi/nccl_types.h"
#include "soak/random.h"

namespace halfwire::soak {
namespace {

// N(0, 1) by Box and Muller, once; elements pick from it.
const std::array<float, 4096>& normals() {
  static const std::array<float, 4096> table = [] {
    std::array<float, 4096> t;
    Random random(1);
    for (size_t i = 0; i < t.size(); i += 2) {
      const double r = std::sqrt(-2 * std::log(1 - random.uniform()));
      const double angle = 2 * M_PI * random.uniform();
      t[i] = static_cast<float>(r * std::cos(angle));
      t[i + 1] = static_cast<float>(r * std::sin(angle));
    }
    return t;
  }();
  return table;
}

struct Range {
  int low;   // exponent of the smallest denormal
  int high;  // exponent of the largest power of two
};

Range exponents(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
      return {-24, 15};
    case ncclFloat64:
      return {-1074, 1023};
    case ncclBfloat16:
      return {-133, 127};
    default:
      return {-149, 127};
  }
}

constexpr uint64_t kRun = 32;

// How the elements of one run are made.
struct RunKind {
  double scale = 1;
  bool zeros = false;
  bool one_huge = false;
};

RunKind runKind(Profile profile, const Range& range, uint64_t key, uint64_t run) {
  Random random(mix(key, run + 0x5151));
  RunKind kind;
  if (profile == Profile::kNormal) return kind;
  const int what = static_cast<int>(random.between(0, 99));
  if (what < 12) {
    kind.zeros = true;
    return kind;
  }
  if (profile == Profile::kWild) {
    kind.scale = std::ldexp(1.0, static_cast<int>(random.between(range.low, range.high - 1)));
    kind.one_huge = what >= 80;
    return kind;
  }
  kind.scale = std::ldexp(1.0, static_cast<int>(random.between(-12, 8)));
  return kind;
}

double special(uint64_t bits) {
  switch (bits % 3) {
    case 0:
      return std::numeric_limits<double>::quiet_NaN();
    case 1:
      return std::numeric_limits<double>::infinity();
    default:
      return -std::numeric_limits<double>::infinity();
  }
}

}  // namespace

const char* profileName(Profile profile) {
  static constexpr const char* kNames[] = {"normal", "mixed", "wild", "specials"};
  return kNames[static_cast<int>(profile)];
}

bool isFloating(ncclDataType_t type) {
  return type == ncclFloat16 || type == ncclBfloat16 || type == ncclFloat32 || type == ncclFloat64;
}

void generate(Profile profile, ncclDataType_t type, uint64_t key, uint64_t count, void* out) {
  if (!isFloating(type)) {
    uint8_t* bytes = static_cast<uint8_t*>(out);
    const uint64_t total = count * ncclTypeBytes(type);
    for (uint64_t i = 0; i < total; i += 8) {
      const uint64_t value = mix(key, i);
      memcpy(bytes + i, &value, total - i < 8 ? total - i : 8);
    }
    return;
  }
  const auto& table = normals();
  const Range range = exponents(type);
  const double largest = std::ldexp(1.5, range.high);
  Random whole(mix(key, 0xbeef));
  const double buffer_scale =
      profile == Profile::kNormal ? std::ldexp(1.0, static_cast<int>(whole.between(-6, 4))) : 1.0;
  for (uint64_t start = 0; start < count; start += kRun) {
    const RunKind kind = runKind(profile, range, key, start / kRun);
    const uint64_t end = start + kRun < count ? start + kRun : count;
    const uint64_t huge_at = start + mix(key, start) % kRun;
    for (uint64_t i = start; i < end; ++i) {
      const uint64_t bits = mix(key, i + 0x100000000ull);
      double value = kind.zeros ? (bits & 1 ? -0.0 : 0.0) : table[bits & 4095] * kind.scale * buffer_scale;
      if (kind.one_huge) value = i == huge_at ? std::copysign(largest, value) : value * 0x1p-40;
      if (profile == Profile::kSpecials && (bits >> 20) % 400 == 0) value = special(bits >> 40);
      // Finite values stay finite: only kSpecials sends infinities.
      if (std::isfinite(value)) value = std::fmax(-largest, std::fmin(largest, value));
      store(type, out, i, value);
    }
  }
}

uint16_t toBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float fromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t toFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f) {
    // Denormals are multiples of 2^-24; nearbyint rounds to even in the default mode.
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  const uint32_t rounded = std::bit_cast<uint32_t>(magnitude) + 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float fromFp16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude =
        mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  } else {
    magnitude = std::bit_cast<float>(static_cast<uint32_t>((exponent + 112) << 23 | mantissa << 13));
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

double load(ncclDataType_t type, const void* buffer, uint64_t index) {
  switch (type) {
    case ncclInt8:
      return static_cast<const int8_t*>(buffer)[index];
    case ncclUint8:
      return static_cast<const uint8_t*>(buffer)[index];
    case ncclFloat64: {
      double value;
      memcpy(&value, static_cast<const char*>(buffer) + index * 8, 8);
      return value;
    }
    case ncclFloat32: {
      float value;
      memcpy(&value, static_cast<const char*>(buffer) + index * 4, 4);
      return value;
    }
    case ncclInt32: {
      int32_t value;
      memcpy(&value, static_cast<const char*>(buffer) + index * 4, 4);
      return value;
    }
    default: {
      uint16_t bits;
      memcpy(&bits, static_cast<const char*>(buffer) + index * 2, 2);
      return type == ncclBfloat16 ? fromBf16(bits) : fromFp16(bits);
    }
  }
}

void store(ncclDataType_t type, void* buffer, uint64_t index, double value) {
  char* at = static_cast<char*>(buffer);
  if (type == ncclFloat64) {
    memcpy(at + index * 8, &value, 8);
    return;
  }
  // Double rounding does not matter here: the stored element is what the oracle reads back.
  const float narrow = static_cast<float>(value);
  if (type == ncclFloat32) {
    memcpy(at + index * 4, &narrow, 4);
    return;
  }
  const uint16_t bits = type == ncclBfloat16 ? toBf16(narrow) : toFp16(narrow);
  memcpy(at + index * 2, &bits, 2);
}

uint64_t hashBytes(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  uint64_t hash = mix(bytes);
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    hash = (std::rotl(hash, 23) ^ word) * 0x9fb21c651e98df25ull;
  }
  uint64_t rest = 0;
  if (bytes > 0) memcpy(&rest, at, bytes);
  return mix(hash, rest);
}

}  // namespace halfwire::soak
