// bias-grows: the losses of two sides move apart with the steps, as rounding that leans one way makes them.
#pragma once

#include <vector>

#include "parity/compare.h"

namespace halfwire::parity {

// `partners`: for each candidate the baseline that read the same batches, or empty. `margin` in units of the
// loss.
void findBiasGrows(const std::vector<const Subject*>& baseline, const std::vector<const Subject*>& candidate,
                   const std::vector<const Subject*>& partners, const Range& range, const NoiseFloor& noise,
                   double margin, Findings* out);

}  // namespace halfwire::parity
