// The rows of `halfwire bench codec --device cuda`: the kernels of one path beside the GPU's own copy.
#pragma once

#include <functional>

#include "device/device.h"
#include "wire/cuda_check/gpu.h"
#include "wire/measure.h"

namespace halfwire::check {

// Measures as measureCodec() does, on the GPU: launches timed by events, each sample next to one of
// cuMemcpyDtoDAsync that reads and writes as many bytes, medians over `samples`. `device` is a device of the
// GPU, its codec name goes into the row's path; the case's own path is not looked at. Fails without elements,
// packets or memory; other driver errors end the program, as Gpu says.
Result<CodecRow> measureCudaCodec(const Gpu& gpu, Device& device, const CodecCase& c, int samples,
                                  const std::function<void(double)>& progress = {});

}  // namespace halfwire::check
