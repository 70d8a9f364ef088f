// The arithmetic of reductions: operands in rank order, bf16, fp16 and fp32 accumulated in fp32 and rounded
// once, fp64 in fp64, integers exactly (modulo their width).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "abi/nccl.h"

namespace halfwire::hostccl {

enum class Operator : uint8_t {
  kSum,
  kProd,
  kMax,
  kMin,
  kPreMulSum,  // every operand times its rank's own factor, then the sum
  kSumDivide,  // integer average: the sum, divided by the number of ranks, rounded towards zero
};

// A reduction operator as it was when the call was made.
struct Reduction {
  Operator op = Operator::kSum;
  uint64_t factor = 0;                  // kPreMulSum: the scalar's bits in the operation's type
  const void* device_factor = nullptr;  // if not null: where to read it when the operation runs
  bool same_factor = false;             // every rank has this factor
};

// 1 / ranks rounded to `type`, by which NCCL's average multiplies before it sums; its bits. Floating types
// only.
uint64_t averageFactor(ncclDataType_t type, int ranks);

// True if `type` can be reduced (FP8 cannot, as on GPUs before sm_90).
bool canReduce(ncclDataType_t type);

// out[i] = op over k of inputs[k][i]; for kPreMulSum inputs[k] is multiplied by factors[k] (bits in `type`;
// the product is rounded to the accumulator's type only). `out` may be one of the inputs; nothing else may
// overlap. Max and Min ignore a NaN beside a number, as fmax does and as NCCL does.
void reduce(ncclDataType_t type, Operator op, std::span<const void* const> inputs,
            std::span<const uint64_t> factors, void* out, size_t count);

}  // namespace halfwire::hostccl
