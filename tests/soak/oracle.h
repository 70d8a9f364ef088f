// What the result of an operation may be, computed in fp64 from what every rank sent.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi/nccl.h"
#include "wire/format.h"

namespace halfwire::soak {

// How a call's elements travel.
enum class Travel : uint8_t {
  kExact,    // NCCL's own arithmetic in the operation's type
  kOneShot,  // quantized once by every rank, summed, rounded to the type (ReduceScatter; AllReduce of two
             // ranks)
  kTwoShot,  // the sum is quantized once more (AllReduce of three ranks and more)
  kGather,   // quantized by its owner, no sum
};

struct Reduction {
  ncclDataType_t type = ncclFloat32;
  std::vector<const void*> inputs;  // by rank
  uint64_t first = 0;               // the first element of the inputs that belongs to the output
  uint64_t count = 0;               // elements of the output
  enum { kSum, kAvg, kMax, kMin } op = kSum;
  std::vector<double> scalars;  // PreMulSum's, by rank; empty for none
  Travel travel = Travel::kExact;
  WireFormat format;        // unless travel is kExact; blocks start at `first`
  bool stochastic = false;  // rounding
};

struct Verdict {
  std::string error;             // empty if every element is allowed
  uint64_t finite_elements = 0;  // elements whose result had to be finite
  uint64_t rounded = 0;          // of those: not the true result rounded to the type
  double worst = 0;              // largest error over its bound
};

// Checks `output` against the bounds. Elements that are NaN or infinite on any rank have to come out so.
Verdict checkReduction(const Reduction& reduction, const void* output);

// Checks one rank's part of a compressed AllGather: `input` is what that rank sent.
Verdict checkGathered(ncclDataType_t type, const WireFormat& format, bool stochastic, const void* input,
                      uint64_t count, const void* output);

// The smallest magnitude that rounds to infinity in `type` (docs/wire-format.md's O), and its largest value
// (X).
double overflowOf(ncclDataType_t type);
double largestOf(ncclDataType_t type);

}  // namespace halfwire::soak
