// The analysis as tables for a terminal.
#pragma once

#include <string>

#include "analysis/analyze.h"

namespace halfwire::report {

// `top`: rows of the longest tables (collectives, steps). The text ends in a line end and has no control
// characters: names from the traces are cleaned.
std::string analyzeText(const analysis::Analysis& analysis, int top);

}  // namespace halfwire::report
