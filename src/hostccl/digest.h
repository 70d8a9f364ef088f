// Keyed digests for the handshakes of the host engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace halfwire::hostccl {

using Token = std::array<uint8_t, 32>;  // the secret of a communicator's unique id
using Nonce = std::array<uint8_t, 16>;
using Digest = std::array<uint8_t, 16>;

// SipHash-2-4 with 128-bit output (Aumasson, Bernstein: "SipHash: a fast short-input PRF") under the first
// half of the token, then again over that result and the second half. `label` separates the uses of one
// token.
Digest keyedDigest(const Token& token, char label, std::span<const uint8_t> message);

// Time does not depend on where the two differ.
bool equalConstantTime(const Digest& a, const Digest& b);

// Fills from the kernel's generator; false if it fails.
bool fillRandom(std::span<uint8_t> out);

// The plain SipHash-2-4-128, for its test vectors.
Digest sipHash128(std::span<const uint8_t, 16> key, std::span<const uint8_t> message);

}  // namespace halfwire::hostccl
