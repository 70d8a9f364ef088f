// What libhalfwire-hostrt.so offers libhalfwire-hostccl.so beside the CUDA names. A real NCCL has the CUDA
// runtime linked in statically, so wrappers of CUDA names around the program never see NCCL's own calls; the
// host engine goes through this table for the same reason.
#pragma once

#include "abi/host_engine.h"

extern "C" {
#pragma GCC visibility push(default)
// The runtime's functions, not interposable.
const HalfwireHostEngine* halfwire_hostrt_engine(void);
// Tells the delay generator which rank this process is.
void halfwire_hostrt_set_rank(int rank);
#pragma GCC visibility pop
}
