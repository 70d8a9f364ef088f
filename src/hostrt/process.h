// The one runtime of a process: made at the first call, refused beside a real CUDA, unusable in a forked
// child.
#pragma once

#include "abi/cuda_runtime.h"
#include "hostrt/memory.h"
#include "hostrt/runtime.h"

namespace halfwire::hostrt {

struct Process {
  Runtime runtime;
  Memory memory;
};

// The process's runtime, or null with `error` set. `allocating` looks again for a CUDA that came later.
Process* process(cudaError_t* error, bool allocating = false);

// Why process() refuses, as one sentence; null where it does not.
const char* refusal(cudaError_t error);

}  // namespace halfwire::hostrt
