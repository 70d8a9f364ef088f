// How often the verdicts of default settings are wrong, on made-up runs whose true difference is known.
#pragma once

#include <string>
#include <vector>

#include "parity/compare.h"
#include "parity/synthetic_run.h"

namespace halfwire::parity {

struct Scenario {
  std::string name;
  size_t baseline = 3, candidate = 3, noise = 0;
  double sd = 0.002;             // between runs, of the tail loss
  double gap = 0;                // true difference, of the tail loss
  double noise_of_step = 0.005;  // leaves 0.04 % in a tail mean
  double correlation = 0.3;
};

struct Counts {
  size_t n = 0, equivalent = 0, different = 0, undecided = 0;
  size_t hard = 0;    // experiments with a hard finding
  size_t warned = 0;  // and with a warning
};

// `trials` independent experiments; none of their runs is used twice.
inline Counts measure(const Scenario& s, size_t trials, uint64_t seed) {
  Counts c;
  c.n = trials;
  for (size_t trial = 0; trial < trials; ++trial) {
    Inputs inputs;
    const auto add = [&](size_t n, double gap, std::vector<Run>* to) {
      for (size_t i = 0; i < n; ++i) {
        Synthetic run;
        run.seed = ++seed;
        run.run_noise = s.sd * run.floor;
        run.gap = gap * run.floor;
        run.noise = s.noise_of_step;
        run.correlation = s.correlation;
        to->push_back(makeRun(run));
      }
    };
    add(s.baseline, 0, &inputs.baseline);
    add(s.candidate, s.gap, &inputs.candidate);
    add(s.noise, 0, &inputs.noise);
    const Comparison result = compareRuns(inputs);
    c.equivalent += result.verdict == Verdict::kEquivalent;
    c.different += result.verdict == Verdict::kDifferent;
    c.undecided += result.verdict == Verdict::kUndecided;
    bool hard = false, warned = false;
    for (const Finding& f : result.findings) {
      hard = hard || f.severity == Severity::kHard;
      warned = warned || f.severity == Severity::kWarning;
    }
    c.hard += hard;
    c.warned += warned;
  }
  return c;
}

// One-sided upper limit at 95 % of a rate of which k of n were seen (Clopper and Pearson 1934).
inline double upperLimit(size_t k, size_t n) {
  double low = 0, high = 1;
  for (int i = 0; i < 60; ++i) {
    const double p = 0.5 * (low + high);
    // P(X <= k) = I_{1-p}(n - k, k + 1)
    const bool above =
        k < n && incompleteBeta(static_cast<double>(n - k), static_cast<double>(k) + 1, 1 - p) > 0.05;
    (above ? low : high) = p;
  }
  return k >= n ? 1 : high;
}

inline std::vector<Scenario> scenarios() {
  return {
      {"one run alone", 1, 0, 0, 0.002, 0},
      {"1 and 1, sd 0.2 %", 1, 1, 0, 0.002, 0},
      {"1 and 1, sd 1 %", 1, 1, 0, 0.01, 0},
      {"1 and 1, sd 2 %", 1, 1, 0, 0.02, 0},
      {"1 and 1, steps 50 times as noisy", 1, 1, 0, 0.002, 0, 0.25, 0.8},
      {"3 and 3, sd 0.1 %", 3, 3, 0, 0.001, 0},
      {"3 and 3, sd 0.2 %", 3, 3, 0, 0.002, 0},
      {"3 and 3, sd 1 %", 3, 3, 0, 0.01, 0},
      {"3 and 3, sd 5 %", 3, 3, 0, 0.05, 0},
      {"5 and 5, sd 0.2 %", 5, 5, 0, 0.002, 0},
      {"1 and 1 with 4 noise runs, sd 0.1 %", 1, 1, 4, 0.001, 0},
      {"3 and 3, sd 0.2 %, gap 0.5 % (the margin)", 3, 3, 0, 0.002, 0.005},
      {"5 and 5, sd 0.2 %, gap 0.5 % (the margin)", 5, 5, 0, 0.002, 0.005},
      {"1 and 1 with 4, sd 0.1 %, gap 0.5 %", 1, 1, 4, 0.001, 0.005},
      {"3 and 3, sd 0.2 %, gap 1 %", 3, 3, 0, 0.002, 0.01},
      {"5 and 5, sd 0.2 %, gap 1 %", 5, 5, 0, 0.002, 0.01},
      {"5 and 5, sd 0.2 %, gap 2 %", 5, 5, 0, 0.002, 0.02},
      {"1 and 1, sd 0.2 %, gap 15 %", 1, 1, 0, 0.002, 0.15},
  };
}

}  // namespace halfwire::parity
