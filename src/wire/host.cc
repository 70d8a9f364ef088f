// What the host runs: the fastest SIMD code that the processor supports, else the scalar reference.
#include "wire/codec.h"
#include "wire/fp_environment.h"
#include "wire/simd.h"

namespace halfwire::host {
namespace {

const SimdTarget* fastest() {
  static const SimdTarget* const target = simdTargets().empty() ? nullptr : &simdTargets().front();
  return target;
}

}  // namespace

void quantize(const QuantizeJob& job) {
  const SimdTarget* const target = fastest();
  if (target == nullptr || job.rounding.stochastic) return reference::quantize(job);
  const FpEnvironment environment(kIeeeArithmetic);
  target->quantize(job);
}

void dequantize(const DequantizeJob& job) {
  const SimdTarget* const target = fastest();
  if (target == nullptr) return reference::dequantize(job);
  const FpEnvironment environment(kIeeeArithmetic);
  target->dequantize(job);
}

void reduce(const ReduceJob& job) {
  const SimdTarget* const target = fastest();
  if (target == nullptr || (job.rounding.stochastic && job.to_packet)) return reference::reduce(job);
  const FpEnvironment environment(kIeeeArithmetic);
  target->reduce(job);
}

const char* simdTarget() { return fastest() != nullptr ? fastest()->name : "scalar"; }

}  // namespace halfwire::host
