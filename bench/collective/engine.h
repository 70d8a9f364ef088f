// What differs between the engines that one rank of the benchmark can run on: the host engine, or NCCL on
// GPUs.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/device.h"

namespace halfwire::bench {

// "host" or "nccl".
const char* engineName();

// The device that runs codec jobs of the benchmark's own algorithms.
Result<std::unique_ptr<Device>> makeDevice(int ordinal);

// Bytes this process has sent so far, where the engine counts them; 0 where it does not.
uint64_t egressBytes();

}  // namespace halfwire::bench
