// The verdict: are two ways to train equivalent? A pure function of the records.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parity/findings/findings.h"
#include "parity/record.h"
#include "parity/series.h"
#include "parity/statistics.h"

namespace halfwire::parity {

struct CompareOptions {
  double margin = 0.005;                  // of the baseline's tail loss
  std::optional<double> margin_absolute;  // in units of the loss, instead
  std::optional<uint64_t> margin_steps;   // the loss that the baseline had so many steps earlier, instead
  double tail = 0.2;                      // share of the common steps whose mean loss decides
  double gross = 0.1;                     // of the tail loss, or of the loss's drop: see docs/parity.md
};

enum class Verdict { kEquivalent, kDifferent, kUndecided };
enum class Side { kBaseline, kCandidate, kNoise };

struct RunSummary {
  Side side = Side::kBaseline;
  std::string label;
  std::string path;
  size_t ranks = 0;
  size_t losses = 0;
  uint32_t first_step = 0, last_step = 0;
  std::optional<double> tail;  // mean loss of the tail
  bool counted = true;         // not a copy of another
};

// The steps whose losses are compared, and the tail among them: [first, end) and [tail, end).
struct Range {
  uint32_t first = 0, tail = 0, end = 0;
};

struct NoiseFloor {
  enum class Source { kNone, kRepeats, kNoiseRuns } source = Source::kNone;
  double sd = 0;  // of one run's tail mean
  double df = 0;
  size_t runs = 0;
};

struct Difference {
  double baseline = 0, candidate = 0;         // tail means
  double value = 0;                           // candidate - baseline
  double margin = 0, gross = 0;               // in units of the loss
  std::optional<double> steps, margin_steps;  // how much earlier the baseline had that loss
  enum class Method { kWelch, kPaired, kNoiseFloor, kOneRunASide } method = Method::kOneRunASide;
  std::optional<Interval> interval90, interval_outer;  // at 90 % and at 99.5 %
  std::optional<double> p;                             // of not being equivalent
  std::optional<double> within_run;  // standard error of the value that one run's own fluctuation explains
  size_t batches = 0;                // of the step-by-step comparison, 0 where there was none
  double tau = 0;                    // its integrated autocorrelation time, steps
};

// The first thing that a pair of runs with equal batches does not share.
struct Parting {
  std::string baseline, candidate;  // labels
  uint32_t step = 0;
  int64_t rank = 0;
  std::string quantity;
  double from = kAbsent, to = kAbsent;  // the two values; absent for hashes
  bool past_one_percent = false;        // the first difference past 1 %, else the first in any bit
};

struct Comparison {
  bool alone = false;
  Verdict verdict = Verdict::kUndecided;
  std::string reason;
  int exit_code = 2;
  std::vector<RunSummary> runs;
  std::optional<Range> range;
  NoiseFloor noise;
  std::optional<Difference> difference;
  std::optional<size_t> runs_needed;  // a side
  bool runs_needed_is_least = false;  // the noise between runs is not known: at least so many
  std::vector<Parting> partings;
  Findings findings;
  size_t paired = 0;  // candidates that read a baseline's batches at every step
};

struct Inputs {
  std::vector<Run> baseline, candidate, noise;
};

// No candidate: every baseline on its own.
Comparison compareRuns(const Inputs& inputs, const CompareOptions& options = {});

const char* verdictName(Verdict v);
const char* severityName(Severity s);
const char* sideName(Side s);
const char* methodName(Difference::Method m);
const char* noiseSourceName(NoiseFloor::Source s);

}  // namespace halfwire::parity
