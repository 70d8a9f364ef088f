// A run seen step by step over all of its ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parity/record.h"

namespace halfwire::parity {

// Loss by step: the mean over the ranks that have it, in order of step. A value that is not finite on some
// rank is infinite here. Steps without a loss are left out.
struct LossSeries {
  std::vector<uint32_t> step;
  std::vector<double> loss;

  // The part whose steps lie in [first, end).
  struct Part {
    std::span<const uint32_t> step;
    std::span<const double> loss;
  };
  Part between(uint32_t first, uint32_t end) const;
};
LossSeries lossSeries(const Run& run);

// What findings look at: a run, its losses and the name it goes by.
struct Subject {
  const Run* run = nullptr;
  std::string label;
  LossSeries losses;
};

// The ranks hold parts of the parameters (FSDP, ZeRO). Nothing said: not.
bool sharded(const Run& run);
// The header says of itself, or it follows from what it says, that gradients are equal on all ranks.
bool gradientsAreShared(const Run& run);

// The root of the sum of squares over the parameter groups of a row, and over the ranks where they hold
// shards; kAbsent where a part was not recorded.
double joinedNorm(const Run& run, uint32_t step, ShortColumn Group::* column);
// The largest rate of the groups, of the first rank.
double rate(const RankRecord& rank, size_t row);
// True where the update was skipped by a loss scaler, or gradients were not finite.
bool skippedOrBad(const RankRecord& rank, size_t row);

uint32_t firstStep(const Run& run);
uint32_t lastStep(const Run& run);

}  // namespace halfwire::parity
