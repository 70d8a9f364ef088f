// The SIMD code of the host, one set of functions for each instruction set it is compiled for.
#pragma once

#include <span>

#include "wire/codec.h"

namespace halfwire {

// What runs on one instruction set. The functions expect kIeeeArithmetic (wire/fp_environment.h) to be set
// and may leave the mode at kFlushSubnormals.
struct SimdTarget {
  const char* name = "scalar";  // as in host::simdTarget()
  void (*quantize)(const QuantizeJob&) = nullptr;
  void (*dequantize)(const DequantizeJob&) = nullptr;
  void (*reduce)(const ReduceJob&) = nullptr;
};

// The targets that this processor and operating system support, fastest first; empty where there are none.
// Thread-safe.
std::span<const SimdTarget> simdTargets();

}  // namespace halfwire
