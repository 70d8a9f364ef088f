// What the host runs: the scalar reference.
#include "wire/codec.h"

namespace halfwire::host {

void quantize(const QuantizeJob& job) { reference::quantize(job); }
void dequantize(const DequantizeJob& job) { reference::dequantize(job); }
void reduce(const ReduceJob& job) { reference::reduce(job); }
const char* simdTarget() { return "scalar"; }

}  // namespace halfwire::host
