#include "abi/host_engine.h"
#include "engine.h"

namespace halfwire::bench {

const char* engineName() { return "host"; }

Result<std::unique_ptr<Device>> makeDevice(int ordinal) {
  return makeHostDevice(halfwire_host_engine_v1(), ordinal);
}

uint64_t egressBytes() { return halfwire_host_egress_bytes(); }

}  // namespace halfwire::bench
