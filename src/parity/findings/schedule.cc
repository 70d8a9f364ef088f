// schedule-shifted, schedule-stretched, schedule-differs: the rates of a candidate beside the baseline's, and
// a warm-up beside what the header asked for.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

constexpr double kSame = 1e-6;  // relative: rates kept in 32 bits
constexpr int kFurthest = 64;   // steps of a shift, factors of a stretch

bool equal(double a, double b) { return std::fabs(a - b) <= kSame * std::max(std::fabs(a), std::fabs(b)); }

// Rates by step; absent ones NaN. Rates that were not recorded just before their update say nothing of steps.
class Rates {
 public:
  explicit Rates(const RankRecord& rank) : rank_(rank) {}
  double at(int64_t step) const {
    if (step < 0 || step > ~uint32_t{0}) return kAbsent;
    const auto row = rank_.row(static_cast<uint32_t>(step));
    return row ? rate(rank_, *row) : kAbsent;
  }

 private:
  const RankRecord& rank_;
};

struct Match {
  size_t compared = 0;
  size_t same = 0;
  size_t moved = 0;  // of the compared, how many rates are not those of the step before
  bool holds(size_t least) const { return compared >= least && moved >= 3 && 100 * same >= 99 * compared; }
};

// Compares candidate.at(step) with baseline.at(map(step)) at up to some thousand steps: of the start, where
// warm-ups are, and evenly over the rest.
template <class Map>
Match match(const Rates& baseline, const Rates& candidate, const std::vector<int64_t>& steps, Map map) {
  Match m;
  for (const int64_t step : steps) {
    const int64_t other = map(step);
    if (other < 0) continue;
    const double a = baseline.at(other), b = candidate.at(step);
    if (std::isnan(a) || std::isnan(b)) continue;
    ++m.compared;
    m.same += equal(a, b);
    const double before = candidate.at(step - 1);
    m.moved += !std::isnan(before) && !equal(before, b);
  }
  return m;
}

std::vector<int64_t> sampleSteps(const RankRecord& candidate) {
  std::vector<int64_t> steps;
  const size_t rows = candidate.rows();
  const size_t start = std::min<size_t>(rows, 2000);
  for (size_t row = 0; row < start; ++row) steps.push_back(candidate.step[row]);
  const size_t stride = std::max<size_t>(1, (rows - start) / 2000);
  for (size_t row = start; row < rows; row += stride) steps.push_back(candidate.step[row]);
  return steps;
}

}  // namespace

void findScheduleDifferences(const Subject& baseline, const Subject& candidate, Findings* out) {
  if (!baseline.run->ratesAreExact() || !candidate.run->ratesAreExact()) return;
  const RankRecord& b = baseline.run->ranks.front();
  const RankRecord& c = candidate.run->ranks.front();
  const Rates rb(b), rc(c);
  const std::vector<int64_t> steps = sampleSteps(c);
  int64_t first = -1;
  size_t compared = 0, apart = 0;
  for (const int64_t step : steps) {
    const double x = rb.at(step), y = rc.at(step);
    if (std::isnan(x) || std::isnan(y)) continue;
    ++compared;
    if (equal(x, y)) continue;
    ++apart;
    if (first < 0) first = step;
  }
  if (apart == 0) return;
  Finding f{"schedule-differs", Severity::kWarning, candidate.label, first, c.header.rank};
  f.evidence = fmt::format("at step {} the rate is {}, the baseline's {}", first, rc.at(first), rb.at(first));

  const size_t least = std::max<size_t>(5, compared / 2);
  for (int shift = 1; shift <= kFurthest; ++shift) {
    for (const int by : {shift, -shift}) {
      if (!match(rb, rc, steps, [&](int64_t step) { return step - by; }).holds(least)) continue;
      f.name = "schedule-shifted";
      f.severity = Severity::kHard;
      f.evidence += fmt::format("; from there on the rates are the baseline's {} step{} {}", shift,
                                shift == 1 ? "" : "s", by > 0 ? "late" : "early");
      f.cause =
          by > 0 ? "the scheduler starts behind: its first value was used twice or is 0 (LambdaLR applies "
                   "schedule(0) when it "
                   "is made)"
                 : "the scheduler is stepped before the optimizer, or once more when it is made or resumed";
      out->push_back(std::move(f));
      return;
    }
  }
  for (int factor = 2; factor <= kFurthest; ++factor) {
    for (const bool fast : {true, false}) {
      // A fast schedule leaves the baseline's end early: a quarter of the steps must do.
      const size_t some =
          std::max<size_t>(5, fast ? compared / static_cast<size_t>(2 * factor) : compared / 2);
      const Match m =
          match(rb, rc, steps, [&](int64_t step) { return fast ? step * factor : step / factor; });
      const Match late = match(
          rb, rc, steps, [&](int64_t step) { return fast ? step * factor + factor - 1 : step / factor; });
      if (!m.holds(some) && !late.holds(some)) continue;
      f.name = "schedule-stretched";
      f.severity = Severity::kHard;
      const auto is = [&](const std::optional<int64_t>& v) { return v && *v == factor; };
      f.evidence += fmt::format("; the rates are the baseline's at the step {} {}",
                                fast ? "times" : "divided by", factor);
      f.cause = fmt::format("the scheduler advances {} for each update{}",
                            fast ? fmt::format("{} times", factor) : fmt::format("once in {} times", factor),
                            is(c.header.accumulation) || is(b.header.accumulation)
                                ? ": once for every micro-batch of the accumulation, or the reverse"
                            : c.header.world_size == factor || b.header.world_size == factor
                                ? ": once for every rank, or the reverse"
                                : "");
      out->push_back(std::move(f));
      return;
    }
  }
  bool scaled = true;
  double ratio = kAbsent;
  for (const int64_t step : steps) {
    const double x = rb.at(step), y = rc.at(step);
    if (!(x > 0) || !(y > 0)) continue;
    if (std::isnan(ratio)) ratio = y / x;
    scaled = scaled && std::fabs(y / x - ratio) <= 1e-5 * ratio;
  }
  if (scaled && !std::isnan(ratio))
    f.evidence += fmt::format("; {:.6g} times the baseline's at every step", ratio);
  f.evidence += fmt::format("; {} of {} compared steps differ", apart, compared);
  f.cause = "another schedule, another length of it, or another base rate";
  out->push_back(std::move(f));
}

void findWarmupStretched(const Subject& s, Findings* out) {
  if (!s.run->ratesAreExact()) return;
  const RankRecord& rank = s.run->ranks.front();
  const int64_t warmup = rank.header.warmup.value_or(0);
  if (warmup < 4 || rank.step.front() != 0) return;
  size_t peak = 0;
  while (peak + 1 < rank.rows() && rate(rank, peak + 1) > rate(rank, peak) * (1 + 1e-9)) ++peak;
  if (peak + 1 >= rank.rows()) return;  // still rising at the end
  for (const auto& factor : {rank.header.accumulation, std::optional<int64_t>(rank.header.world_size)}) {
    if (!factor || *factor < 2) continue;
    const auto near = [&](double expected) { return std::fabs(static_cast<double>(peak) - expected) <= 1.5; };
    if (near(static_cast<double>(warmup))) return;
    if (!near(static_cast<double>(warmup) / static_cast<double>(*factor)) || peak < 1) continue;
    Finding f{"schedule-stretched", Severity::kWarning, s.label, static_cast<int64_t>(rank.step[peak]),
              rank.header.rank};
    f.evidence = fmt::format("the rate peaks at step {}; the warm-up was to take {} steps, {} times as many",
                             rank.step[peak], warmup, *factor);
    f.cause = factor == rank.header.accumulation ? "the scheduler is stepped once for every micro-batch"
                                                 : "the scheduler is stepped once for every rank";
    out->push_back(std::move(f));
    return;
  }
}

}  // namespace halfwire::parity
