#include "hostrt/options.h"

#include <cstdlib>
#include <string>

#include "base/units.h"

namespace halfwire::hostrt {
namespace {

Status readInteger(const char* name, int64_t min, int64_t max, int64_t* out) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return {};
  Result<int64_t> value = parseInteger(text, min, max, name);
  if (!value.ok()) return value.status();
  *out = value.value();
  return {};
}

}  // namespace

Result<Options> readOptions() {
  Options options;
  int64_t devices = options.devices, seed = 0, queues = 0, rank = 0;
  if (Status s = readInteger("HALFWIRE_HOST_DEVICES", 1, 64, &devices); !s.ok()) return s;
  if (Status s = readInteger("HALFWIRE_HOST_DELAY_US", 0, 10'000'000, &options.delay_us); !s.ok()) return s;
  if (Status s = readInteger("HALFWIRE_HOST_SEED", 0, INT64_MAX, &seed); !s.ok()) return s;
  if (Status s = readInteger("HALFWIRE_HOST_HW_QUEUES", 0, 32, &queues); !s.ok()) return s;
  // RANK belongs to the launcher: a value we cannot read only means that this process delays like rank 0.
  if (!readInteger("RANK", 0, INT32_MAX, &rank).ok()) rank = 0;
  if (const char* trace = std::getenv("HALFWIRE_HOST_TRACE")) options.trace = trace;
  options.devices = static_cast<int>(devices);
  options.seed = static_cast<uint64_t>(seed);
  options.hardware_queues = static_cast<int>(queues);
  options.rank = static_cast<int>(rank);
  return options;
}

}  // namespace halfwire::hostrt
