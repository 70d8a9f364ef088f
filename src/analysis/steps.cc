#include "analysis/steps.h"

#include <algorithm>
#include <limits>

namespace halfwire::analysis {

using trace::Activity;
using trace::kNone;
using trace::Timeline;

size_t findPeriod(const std::vector<uint64_t>& sequence) {
  const size_t n = sequence.size();
  const size_t longest = std::min<size_t>(n / 3, 4096);  // bounds the work at n * 4096 in the worst case
  for (size_t p = 1; p <= longest; ++p) {
    size_t allowed = (n - p) / 20;
    bool repeats = true;
    for (size_t i = 0; i + p < n; ++i) {
      if (sequence[i] == sequence[i + p]) continue;
      if (allowed-- == 0) {
        repeats = false;
        break;
      }
    }
    if (repeats) return p;
  }
  return 0;
}

namespace {

std::vector<StepWindow> annotated(const Timeline& t, const std::vector<uint32_t>& members, int64_t end_ns) {
  const size_t n = t.steps.size();
  std::vector<int64_t> first(n, std::numeric_limits<int64_t>::max());
  for (const uint32_t m : members) {
    const Activity& a = t.activities[m];
    if (a.call == kNone) continue;
    const int64_t launched = t.calls[a.call].start_ns;
    const auto after = std::partition_point(t.steps.begin(), t.steps.end(),
                                            [&](const trace::Step& s) { return s.start_ns <= launched; });
    if (after == t.steps.begin()) continue;
    const auto step = static_cast<size_t>(after - t.steps.begin()) - 1;
    if (launched >= t.steps[step].end_ns) continue;
    first[step] = std::min(first[step], a.start_ns);
  }
  std::vector<StepWindow> windows;
  int64_t floor = std::numeric_limits<int64_t>::min();
  for (size_t i = 0; i < n; ++i) {
    if (first[i] == std::numeric_limits<int64_t>::max()) continue;
    const int64_t start = std::max(first[i], floor);
    if (!windows.empty()) windows.back().end_ns = start;
    windows.push_back({t.steps[i].number, start, end_ns});
    floor = start;
  }
  // Without launches the annotations themselves are the best there is.
  if (windows.empty()) {
    for (const trace::Step& s : t.steps) {
      const int64_t start = std::max({s.start_ns, floor, t.activities[members.front()].start_ns});
      const int64_t end = std::min(s.end_ns, end_ns);
      if (end <= start) continue;
      windows.push_back({s.number, start, end});
      floor = end;
    }
  }
  return windows;
}

}  // namespace

std::vector<StepWindow> findSteps(const Timeline& t, const std::vector<uint32_t>& members, int64_t end_ns,
                                  bool* detected) {
  *detected = false;
  if (!t.steps.empty()) return annotated(t, members, end_ns);
  // A collective is told from others by its name, its size and how many kernels came since the one before.
  std::vector<uint64_t> sequence;
  std::vector<int64_t> starts;
  uint64_t between = 0;
  for (const uint32_t m : members) {
    const Activity& a = t.activities[m];
    if (a.kind != trace::ActivityKind::kComm) {
      ++between;
      continue;
    }
    uint64_t key = a.name * 0x9E3779B97F4A7C15ULL + between;
    if (a.comm != kNone)
      key = (key ^ static_cast<uint64_t>(t.comms[a.comm].in_elements)) * 0xBF58476D1CE4E5B9ULL;
    sequence.push_back(key);
    starts.push_back(a.start_ns);
    between = 0;
  }
  const size_t period = findPeriod(sequence);
  // A period of one collective is as likely a bucket as a step.
  if (period < 2) return {};
  std::vector<StepWindow> windows;
  for (size_t i = 0; i + period <= starts.size(); i += period) {
    if (!windows.empty()) windows.back().end_ns = starts[i];
    windows.push_back({static_cast<int64_t>(windows.size()), starts[i], end_ns});
  }
  if (const size_t rest = starts.size() % period; rest > 0 && !windows.empty()) {
    windows.back().end_ns = starts[starts.size() - rest];
  }
  *detected = true;
  return windows;
}

}  // namespace halfwire::analysis
