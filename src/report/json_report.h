// The analysis as JSON for programs. The schema is docs/analyze-schema.md; its version changes when a field
// changes meaning.
#pragma once

#include <string>

#include "analysis/analyze.h"

namespace halfwire::report {

inline constexpr int kAnalyzeSchemaVersion = 1;

// UTF-8 (names that are not are mended), indented by two spaces, ends in a line end.
std::string analyzeJson(const analysis::Analysis& analysis);

}  // namespace halfwire::report
