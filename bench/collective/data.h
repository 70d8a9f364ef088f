// Test data that every rank can make for every rank: element i of rank r is a function of (r, i) alone.
#pragma once

#include <cstdint>
#include <vector>

#include "wire/format.h"

namespace halfwire::bench {

// N(0,1), rounded to `type`, of elements [begin, begin + count) of `rank`'s input.
void fillNormal(DataType type, uint32_t rank, uint64_t begin, uint64_t count, void* out);

// `count` elements of `type` as doubles, exactly.
void toDouble(DataType type, const void* in, uint64_t count, double* out);

// FNV-1a over 64-bit words and the bytes that remain.
uint64_t hashBytes(const void* data, uint64_t bytes);

}  // namespace halfwire::bench
