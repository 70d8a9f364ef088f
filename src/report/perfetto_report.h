// The input trace with tracks added that say when communication was exposed, for Perfetto or
// chrome://tracing.
#pragma once

#include <cstdio>
#include <string>

#include "analysis/analyze.h"
#include "base/status.h"

namespace halfwire::report {

// Writes to `out`. One Kineto file is copied byte for byte (decompressed) with the tracks added at the end of
// its list of events; several files, damaged ones and other formats become a new trace of the device's
// intervals with the tracks. Needs an analysis that kept its timelines.
Status writePerfetto(const analysis::Analysis& analysis, std::FILE* out);

}  // namespace halfwire::report
