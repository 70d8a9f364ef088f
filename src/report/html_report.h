// The analysis as one self-contained HTML file: no network, no other files. It shows what analyzeJson says
// and draws a timeline of single kernels.
#pragma once

#include <string>

#include "analysis/analyze.h"

namespace halfwire::report {

// Needs an analysis that kept its timelines. At most `kDrawnEvents` intervals are drawn for each device: in
// larger recordings neighbours too close to be told apart are drawn as one.
inline constexpr size_t kDrawnEvents = 20'000;
std::string analyzeHtml(const analysis::Analysis& analysis);

}  // namespace halfwire::report
