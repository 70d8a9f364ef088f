#include "parity/series.h"

#include <algorithm>
#include <cmath>

namespace halfwire::parity {

LossSeries::Part LossSeries::between(uint32_t first, uint32_t end) const {
  const auto a = std::lower_bound(step.begin(), step.end(), first) - step.begin();
  const auto b = std::lower_bound(step.begin(), step.end(), end) - step.begin();
  const auto from = static_cast<size_t>(a);
  const auto count = static_cast<size_t>(std::max<ptrdiff_t>(0, b - a));
  return {std::span(step).subspan(from, count), std::span(loss).subspan(from, count)};
}

LossSeries lossSeries(const Run& run) {
  LossSeries s;
  std::vector<size_t> at(run.ranks.size(), 0);
  while (true) {
    bool any = false;
    uint32_t next = 0;
    for (size_t r = 0; r < at.size(); ++r) {
      const auto& steps = run.ranks[r].step;
      if (at[r] == steps.size()) continue;
      if (!any || steps[at[r]] < next) next = steps[at[r]];
      any = true;
    }
    if (!any) return s;
    double sum = 0;
    size_t n = 0;
    for (size_t r = 0; r < at.size(); ++r) {
      const RankRecord& rank = run.ranks[r];
      if (at[r] == rank.step.size() || rank.step[at[r]] != next) continue;
      const double loss = rank.loss[at[r]++];
      if (std::isnan(loss)) continue;
      sum += loss;
      ++n;
    }
    if (n == 0) continue;
    const double mean = sum / static_cast<double>(n);
    s.step.push_back(next);
    s.loss.push_back(std::isfinite(mean) ? mean : std::numeric_limits<double>::infinity());
  }
}

bool sharded(const Run& run) { return run.ranks.front().header.sharded.value_or(false); }

bool gradientsAreShared(const Run& run) {
  const Header& h = run.ranks.front().header;
  if (h.reduced) return *h.reduced;
  return h.sharded && !*h.sharded;
}

double joinedNorm(const Run& run, uint32_t step, ShortColumn Group::* column) {
  double squares = 0;
  bool any = false;
  for (const RankRecord& rank : run.ranks) {
    const auto row = rank.row(step);
    if (!row) return kAbsent;
    for (const Group& g : rank.groups) {
      const double norm = (g.*column)[*row];
      if (std::isnan(norm)) continue;
      squares += norm * norm;
      any = true;
    }
    if (!sharded(run)) break;
  }
  return any ? std::sqrt(squares) : kAbsent;
}

double rate(const RankRecord& rank, size_t row) {
  double most = kAbsent;
  for (const Group& g : rank.groups) {
    const double lr = g.lr[row];
    if (!std::isnan(lr) && !(lr <= most)) most = lr;
  }
  return most;
}

bool skippedOrBad(const RankRecord& rank, size_t row) {
  if (rank.skipped[row] == 1) return true;
  for (const Group& g : rank.groups) {
    const uint32_t bad = g.nonfinite[row];
    if (bad != kNoCount && bad > 0) return true;
    if (std::isinf(g.grad_norm[row])) return true;
  }
  return false;
}

uint32_t firstStep(const Run& run) {
  uint32_t first = std::numeric_limits<uint32_t>::max();
  for (const RankRecord& rank : run.ranks) first = std::min(first, rank.step.front());
  return first;
}

uint32_t lastStep(const Run& run) {
  uint32_t last = 0;
  for (const RankRecord& rank : run.ranks) last = std::max(last, rank.step.back());
  return last;
}

}  // namespace halfwire::parity
