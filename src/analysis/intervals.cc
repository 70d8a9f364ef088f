#include "analysis/intervals.h"

#include <algorithm>

namespace halfwire::analysis {

Spans unionOf(Spans spans) {
  std::erase_if(spans, [](const Span& s) { return s.end_ns <= s.start_ns; });
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.start_ns < b.start_ns; });
  size_t kept = 0;
  for (const Span& s : spans) {
    if (kept > 0 && spans[kept - 1].end_ns >= s.start_ns) {
      spans[kept - 1].end_ns = std::max(spans[kept - 1].end_ns, s.end_ns);
    } else {
      spans[kept++] = s;
    }
  }
  spans.resize(kept);
  return spans;
}

Spans intersect(const Spans& a, const Spans& b) {
  Spans out;
  size_t i = 0;
  size_t k = 0;
  while (i < a.size() && k < b.size()) {
    const int64_t from = std::max(a[i].start_ns, b[k].start_ns);
    const int64_t to = std::min(a[i].end_ns, b[k].end_ns);
    if (from < to) out.push_back({from, to});
    (a[i].end_ns < b[k].end_ns ? i : k) += 1;
  }
  return out;
}

Spans subtract(const Spans& a, const Spans& b) {
  Spans out;
  size_t k = 0;
  for (const Span& s : a) {
    int64_t from = s.start_ns;
    while (k < b.size() && b[k].end_ns <= from) ++k;
    for (size_t j = k; j < b.size() && b[j].start_ns < s.end_ns; ++j) {
      if (b[j].start_ns > from) out.push_back({from, b[j].start_ns});
      from = std::max(from, b[j].end_ns);
    }
    if (from < s.end_ns) out.push_back({from, s.end_ns});
  }
  return out;
}

int64_t length(const Spans& spans) {
  int64_t total = 0;
  for (const Span& s : spans) total += s.end_ns - s.start_ns;
  return total;
}

int64_t lengthWithin(const Spans& spans, int64_t from, int64_t to) {
  auto it = std::partition_point(spans.begin(), spans.end(), [&](const Span& s) { return s.end_ns <= from; });
  int64_t total = 0;
  for (; it != spans.end() && it->start_ns < to; ++it) {
    total += std::min(to, it->end_ns) - std::max(from, it->start_ns);
  }
  return total;
}

}  // namespace halfwire::analysis
