// Which GPUs NVLink joins, asked of NVIDIA's management library, which NCCL asks too.
#pragma once

#include <cstdint>

#include "device/cuda_driver.h"

namespace halfwire::cuda {

// See Device::nvlinkDomain. Links through a switch reach every GPU of the host; direct links join GPUs that
// all name each other. 0 where the environment keeps NCCL from using them (NCCL_P2P_DISABLE,
// NCCL_P2P_LEVEL=LOC or 0).
uint64_t nvlinkDomain(const Driver& driver, CUdevice device);

}  // namespace halfwire::cuda
