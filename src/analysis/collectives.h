// The table of collectives: how often, how many bytes, how fast, how much of it showed, and what fewer bytes
// could buy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "analysis/account.h"

namespace halfwire::analysis {

struct CollectiveRow {
  trace::Collective type = trace::Collective::kGeneric;
  trace::ElementType element = trace::ElementType::kUnknown;
  std::string group;    // process group where recorded
  uint64_t bucket = 0;  // largest power of two <= bytes of each call; 0: sizes not recorded
  int64_t count = 0;
  int64_t sized = 0;    // calls whose size is recorded
  int64_t bytes = 0;    // of the sized calls, by the nccl-tests definition of a collective's size
  int64_t busy_ns = 0;  // sum of kernel durations
  int64_t exposed_ns = 0;
  int64_t needed_ns =
      0;  // sum over calls of what the wire needs (the minimum over ranks where matched, else the duration)
  int64_t exposed_needed_ns = 0;  // exposed time that is not waiting for a late rank
  double algbw_gbps = 0;          // bytes over needed time of the sized calls, GB/s (1e9); 0 if unknown
  double busbw_gbps = 0;  // algbw times the factor of nccl-tests for the type and group size; 0 if unknown
  double saving = 0;      // fraction of bytes that FP8 with block scales saves for this element type
};

// Bytes of one call by the definition of nccl-tests, or -1.
int64_t collectiveBytes(const trace::CommInfo& info);
// busbw / algbw for `ranks` ranks.
double busFactor(trace::Collective type, int ranks);
// 128 elements of one byte and a 4-byte scale against the element's own size; unknown types count as 16-bit.
double fp8Saving(trace::ElementType element);

// `needed` (one entry for each of lane.comms, or empty): what each call needs without waiting for late ranks.
std::vector<CollectiveRow> tabulate(const trace::Strings& names, const std::vector<CommInterval>& comms,
                                    const std::vector<int64_t>& needed, int world_size);

}  // namespace halfwire::analysis
