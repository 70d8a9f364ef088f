// What libhalfwire.so and libhalfwire-meter.so say to each other. Both are preloaded; the second exports one
// function that returns this table. A library of its own, so that programs without the meter never run a CUDA
// call through us.
#pragma once

#include <cstddef>
#include <cstdint>

#include "policy/run_log.h"

namespace halfwire::meter {

// One collective about to be enqueued.
struct MeterCall {
  void* stream;     // as given to NCCL
  RunLogSize* row;  // where its exposure is counted; may be null
  uint64_t kind;    // equal for calls of the same communicator, operation, type and count
};

// What begin() leaves for end(); on the caller's stack.
struct MeterScope {
  static constexpr int kMost = 8;
  int count = 0;
  int64_t called_ns = 0;  // host time when begin() returned
  void* slots[kMost];
};

struct MeterHooks {
  uint32_t version;  // 1
  uint32_t bytes;    // sizeof(MeterHooks)
  // Once, when the run log is there; `log` stays mapped until the process ends. One step in `every` is
  // sampled.
  void (*start)(RunLogFile* log, uint32_t every);
  // Around the enqueuing of collectives, in the order in which their streams will see them.
  void (*begin)(const MeterCall* calls, size_t count, MeterScope* scope);
  void (*end)(MeterScope* scope);
  // The program says that a step begins.
  void (*step)();
  // It begins an NVTX range that libhalfwire-nvtx.so takes for a step's, called `name`.
  void (*range)(const char* name);
};

#define HALFWIRE_METER_SYMBOL "halfwire_meter_v1"
using MeterHooksFunction = const MeterHooks* (*)();

}  // namespace halfwire::meter
