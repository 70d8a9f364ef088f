// Sets of half-open time intervals, kept as sorted, disjoint spans.
#pragma once

#include <cstdint>
#include <vector>

#include "trace/timeline.h"

namespace halfwire::analysis {

using trace::Span;
using Spans = std::vector<Span>;

// Sorts and merges; empty spans vanish.
Spans unionOf(Spans spans);
// a and b are unions.
Spans intersect(const Spans& a, const Spans& b);
Spans subtract(const Spans& a, const Spans& b);
// Total length in ns.
int64_t length(const Spans& spans);
// Length of the part of `spans` (a union) within [from, to).
int64_t lengthWithin(const Spans& spans, int64_t from, int64_t to);

// Sums of durations from hostile files must not overflow.
inline int64_t addSaturated(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

}  // namespace halfwire::analysis
