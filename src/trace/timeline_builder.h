// The part of reading that is the same for every format: naming, linking and cleaning what a reader
// collected.
#pragma once

#include <vector>

#include "base/status.h"
#include "trace/comm_patterns.h"
#include "trace/timeline.h"

namespace halfwire::trace {

// What an API call does, by its name (CUDA and HIP, runtime and driver, with or without version suffix).
CallKind classifyCall(std::string_view name);

// Adds a span to a list that is kept nearly merged; mergeSpans() makes it exact.
void addSpan(std::vector<Span>* spans, Span span);
void mergeSpans(std::vector<Span>* spans);

// Sorts everything by time, links kernels to the calls that launched them, recognises communication and
// describes it, removes intervals that cannot be true and says so in `warnings`.
Status finishTimeline(Timeline* timeline, const CommPatterns& patterns);

}  // namespace halfwire::trace
