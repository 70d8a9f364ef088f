// The scalar code of one block, on which the reference is built and to which the SIMD code hands the blocks
// that its fast path leaves out. All functions expect kIeeeArithmetic (wire/fp_environment.h) to be set.
#pragma once

#include "wire/codec.h"

namespace halfwire::reference {

// The fp32 value of the factor, read in the job's data type where it lives in memory. Requires
// `factor.present`.
float factorValue(const Factor& factor, DataType type);

// Quantizes `n` <= block elements into codes and one scale (scaleBytes(format.scale) bytes). `factor` may be
// null. The first element is number rounding.first.
void quantizeBlock(const WireFormat& format, DataType type, const void* in, uint32_t n, const float* factor,
                   uint8_t* codes, uint8_t* scale, const Rounding& rounding = {});

// The same from fp32 values; `type` decides what is not finite.
void quantizeFloats(const WireFormat& format, DataType type, const float* y, uint32_t n, uint8_t* codes,
                    uint8_t* scale, const Rounding& rounding = {});

// Dequantizes the `n` elements of one block.
void dequantizeBlock(const WireFormat& format, DataType type, const uint8_t* codes, const uint8_t* scale,
                     uint32_t n, void* out);

// Sums block `block` (of `n` elements) of the job's packets and writes it to the job's output.
void reduceBlock(const ReduceJob& job, uint64_t block, uint32_t n);

}  // namespace halfwire::reference
