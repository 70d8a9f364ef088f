// A comparison in words, as JSON (docs/parity-schema in docs/parity.md) and as a page.
#pragma once

#include <string>

#include "parity/compare.h"

namespace halfwire::parity {

std::string parityText(const Comparison& c);
std::string parityJson(const Comparison& c);
// One file that needs no network: curves with the band of the noise, norms, findings.
std::string parityHtml(const Comparison& c, const Inputs& inputs);

}  // namespace halfwire::parity
