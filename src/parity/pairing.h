// Which runs may be compared step by step, and where such runs part.
#pragma once

#include <optional>
#include <vector>

#include "parity/compare.h"

namespace halfwire::parity {

// Headers say the same and every rank reads the same batches at every step of [first, end).
bool readSameBatches(const Run& a, const Run& b, uint32_t first, uint32_t end);
// At least the first common step has equal batches, or the headers name the same seed.
bool startAlike(const Run& a, const Run& b);

// The first difference in any bit and the first past 1 %, of what the runs recorded.
std::vector<Parting> partingsOf(const Subject& baseline, const Subject& candidate);

}  // namespace halfwire::parity
