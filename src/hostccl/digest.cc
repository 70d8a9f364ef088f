#include "hostccl/digest.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

namespace halfwire::hostccl {
namespace {

uint64_t load(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);  // little endian: the engine runs on x86 and Arm only
  return x;
}

struct SipState {
  uint64_t v0, v1, v2, v3;
  void round() {
    v0 += v1, v1 = std::rotl(v1, 13), v1 ^= v0, v0 = std::rotl(v0, 32);
    v2 += v3, v3 = std::rotl(v3, 16), v3 ^= v2;
    v0 += v3, v3 = std::rotl(v3, 21), v3 ^= v0;
    v2 += v1, v1 = std::rotl(v1, 17), v1 ^= v2, v2 = std::rotl(v2, 32);
  }
};

}  // namespace

Digest sipHash128(std::span<const uint8_t, 16> key, std::span<const uint8_t> message) {
  const uint64_t k0 = load(key.data()), k1 = load(key.data() + 8);
  SipState s{k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xee, k0 ^ 0x6c7967656e657261u,
             k1 ^ 0x7465646279746573u};
  const auto absorb = [&](uint64_t m) {
    s.v3 ^= m;
    s.round(), s.round();
    s.v0 ^= m;
  };
  size_t i = 0;
  for (; i + 8 <= message.size(); i += 8) absorb(load(message.data() + i));
  uint64_t last = uint64_t{message.size() & 0xff} << 56;
  for (size_t j = 0; i + j < message.size(); ++j) last |= uint64_t{message[i + j]} << (8 * j);
  absorb(last);
  const auto squeeze = [&] {
    for (int r = 0; r < 4; ++r) s.round();
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
  };
  s.v2 ^= 0xee;
  const uint64_t low = squeeze();
  s.v1 ^= 0xdd;
  const uint64_t high = squeeze();
  Digest out;
  std::memcpy(out.data(), &low, 8);
  std::memcpy(out.data() + 8, &high, 8);
  return out;
}

Digest keyedDigest(const Token& token, char label, std::span<const uint8_t> message) {
  std::vector<uint8_t> labelled(1, static_cast<uint8_t>(label));
  labelled.insert(labelled.end(), message.begin(), message.end());
  const std::span<const uint8_t, 32> key(token);
  const Digest inner = sipHash128(key.first<16>(), labelled);
  return sipHash128(key.last<16>(), inner);
}

bool equalConstantTime(const Digest& a, const Digest& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

bool fillRandom(std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t n = getrandom(out.data(), out.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    out = out.subspan(static_cast<size_t>(n));
  }
  return true;
}

}  // namespace halfwire::hostccl
