// Buffers of test data as functions of a key: whoever knows the key can compute what any rank sent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/nccl.h"

namespace halfwire::soak {

enum class Profile : uint8_t {
  kNormal,    // N(0, 1) times one power of two for the whole buffer
  kMixed,     // each run of 32 elements its own magnitude, zeros among them
  kWild,      // up to the type's largest values, denormals, one huge value beside tiny ones
  kSpecials,  // as kMixed, with NaN and infinities in a few elements
};

const char* profileName(Profile profile);

// Elements [0, count) of the buffer `key`. Integers take any value whatever the profile.
void generate(Profile profile, ncclDataType_t type, uint64_t key, uint64_t count, void* out);

// The element as a double; exact for every type (int64 is not used here).
double load(ncclDataType_t type, const void* buffer, uint64_t index);
// Rounds to the type, nearest even.
void store(ncclDataType_t type, void* buffer, uint64_t index, double value);

uint16_t toBf16(float value);
float fromBf16(uint16_t bits);
uint16_t toFp16(float value);
float fromFp16(uint16_t bits);

bool isFloating(ncclDataType_t type);

// A 64-bit hash of bytes.
uint64_t hashBytes(const void* data, size_t bytes);

}  // namespace halfwire::soak
