// What the environment asks of the host runtime.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace halfwire::hostrt {

struct Options {
  int devices = 8;          // HALFWIRE_HOST_DEVICES
  int64_t delay_us = 0;     // HALFWIRE_HOST_DELAY_US: a random 0..N us before each queue entry
  uint64_t seed = 0;        // HALFWIRE_HOST_SEED
  int hardware_queues = 0;  // HALFWIRE_HOST_HW_QUEUES: queues per device, 0 = one per stream
  int rank = 0;             // RANK, where a launcher set it: ranks delay differently
  std::string trace;  // HALFWIRE_HOST_TRACE: a folder for the times of every queue entry, empty for none
};

// Reads and checks the environment; the error names the variable.
Result<Options> readOptions();

}  // namespace halfwire::hostrt
