// bias-grows: the losses of two sides move apart with the steps, as rounding that leans one way makes them.
#pragma once

#include <vector>

#include "parity/compare.h"

namespace halfwire::parity {

// `sd` is the noise of one run's tail mean, 0 where it is not known; `margin` in units of the loss.
void findBiasGrows(const std::vector<const Subject*>& baseline, const std::vector<const Subject*>& candidate,
                   const Range& range, const NoiseFloor& noise, double margin, bool paired, Findings* out);

}  // namespace halfwire::parity
