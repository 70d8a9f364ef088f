#include "parity/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "parity/curve.h"
#include "parity/findings/bias_grows.h"
#include "parity/pairing.h"

namespace halfwire::parity {
namespace {

constexpr double kConfidence = 0.95;            // of `equivalent`
constexpr double kDifferentConfidence = 0.995;  // of `different`
constexpr size_t kLeastRuns = 3;                // a side
constexpr size_t kLeastTail = 10;               // losses in a tail
constexpr double kLeastDrop = 4;                // margins that the baseline's loss must fall
constexpr double kGrossErrors = 6;              // standard errors within the runs that a gross gap must pass

std::vector<double> finite(std::span<const double> values) {
  std::vector<double> out;
  out.reserve(values.size());
  for (const double v : values) {
    if (std::isfinite(v)) out.push_back(v);
  }
  return out;
}

// One side of a comparison.
struct Runs {
  std::vector<Subject> subjects;
  std::vector<size_t> summaries;        // of these, where in Comparison::runs
  std::vector<const Subject*> counted;  // copies of one run count once
  std::vector<double> tails;            // of the counted
};

class Comparing {
 public:
  Comparing(const Inputs& inputs, const CompareOptions& options) : inputs_(inputs), options_(options) {
    c_.alone = inputs.candidate.empty();
    add(inputs.baseline, Side::kBaseline, &baseline_);
    add(inputs.candidate, Side::kCandidate, &candidate_);
    add(inputs.noise, Side::kNoise, &noise_);
  }

  Comparison run() {
    for (const Subject& s : baseline_.subjects) append(findAlone(s), &alone_[0]);
    for (const Subject& s : candidate_.subjects) append(findAlone(s), &alone_[1]);
    if (c_.alone) {
      judgeAlone();
    } else {
      compareFindings();
      const std::optional<std::string> obstacle = measure();
      judge(obstacle);
    }
    append(std::move(compared_), &c_.findings);
    append(std::move(alone_[1]), &c_.findings);
    append(std::move(alone_[0]), &c_.findings);
    std::stable_sort(c_.findings.begin(), c_.findings.end(),
                     [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
    c_.exit_code = exitCode();
    return std::move(c_);
  }

 private:
  void add(const std::vector<Run>& runs, Side side, Runs* to) {
    static constexpr const char* kNames[] = {"baseline", "candidate", "noise"};
    for (const Run& run : runs) {
      Subject s;
      s.run = &run;
      s.label = c_.alone && side == Side::kBaseline ? "run" : kNames[static_cast<int>(side)];
      if (runs.size() > 1) s.label += fmt::format(" {}", to->subjects.size() + 1);
      s.losses = lossSeries(run);
      RunSummary summary;
      summary.side = side;
      summary.label = s.label;
      summary.path = run.path;
      summary.ranks = run.ranks.size();
      summary.losses = s.losses.loss.size();
      summary.first_step = firstStep(run);
      summary.last_step = lastStep(run);
      to->summaries.push_back(c_.runs.size());
      c_.runs.push_back(std::move(summary));
      to->subjects.push_back(std::move(s));
    }
  }

  static void append(Findings from, Findings* to) {
    to->insert(to->end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  }
  static bool has(const Findings& f, Severity severity) {
    return std::any_of(f.begin(), f.end(), [&](const Finding& x) { return x.severity == severity; });
  }
  static const Finding* first(const Findings& f, Severity severity) {
    const auto at =
        std::find_if(f.begin(), f.end(), [&](const Finding& x) { return x.severity == severity; });
    return at == f.end() ? nullptr : &*at;
  }

  void judgeAlone() {
    const Finding* hard = first(alone_[0], Severity::kHard);
    const Finding* refusal = first(alone_[0], Severity::kRefusal);
    if (hard != nullptr) {
      c_.verdict = Verdict::kDifferent;
      c_.reason = fmt::format("{}: {} does not do what training should", hard->name, hard->run);
    } else if (refusal != nullptr) {
      c_.reason = fmt::format("{}: {} cannot be judged", refusal->name, refusal->run);
    } else {
      c_.reason = "nothing hard was found; a run alone is equivalent to nothing";
    }
  }

  int exitCode() const {
    if (c_.verdict == Verdict::kDifferent) return 1;
    if (c_.verdict == Verdict::kEquivalent) return 0;
    return c_.alone && !has(c_.findings, Severity::kRefusal) ? 0 : 2;
  }

  // Each candidate beside the baseline that is most like it.
  void compareFindings() {
    std::set<const Subject*> used;
    for (const Subject& c : candidate_.subjects) {
      const Subject* partner = nullptr;
      for (const bool fresh : {true, false}) {
        for (const Subject& b : baseline_.subjects) {
          if (partner == nullptr && startAlike(*b.run, *c.run) && (!fresh || !used.contains(&b)))
            partner = &b;
        }
      }
      const bool alike = partner != nullptr;
      if (!alike) partner = &baseline_.subjects.front();
      used.insert(partner);
      append(findCompared(*partner, c), &compared_);
      if (!alike) continue;
      auto p = partingsOf(*partner, c);
      c_.partings.insert(c_.partings.end(), p.begin(), p.end());
    }
  }

  // Marks runs of a side whose tails are equal in every bit as copies.
  void countSide(Runs* side) {
    const Range& r = *c_.range;
    std::vector<LossSeries::Part> seen;
    size_t copies = 0;
    for (size_t i = 0; i < side->subjects.size(); ++i) {
      const Subject& s = side->subjects[i];
      const auto part = s.losses.between(r.tail, r.end);
      RunSummary& summary = c_.runs[side->summaries[i]];
      summary.tail = moments(finite(part.loss)).mean;
      const bool copy = std::any_of(seen.begin(), seen.end(), [&](const auto& other) {
        return std::equal(part.loss.begin(), part.loss.end(), other.loss.begin(), other.loss.end());
      });
      if (copy) {
        summary.counted = false;
        ++copies;
        continue;
      }
      seen.push_back(part);
      side->counted.push_back(&s);
      side->tails.push_back(*summary.tail);
    }
    if (copies == 0) return;
    const std::string name = sideName(c_.runs[side->summaries.front()].side);
    compared_.push_back({"runs-identical", Severity::kNote, name, r.tail, std::nullopt,
                         fmt::format("{} of {} runs of the {} have the tail losses of another, bit for bit",
                                     copies, side->subjects.size(), name),
                         "a deterministic program with one seed, or one record given twice; such runs say "
                         "nothing of the noise "
                         "between runs and count as one"});
  }

  // Tail means, margin, noise floor, difference. The sentence that says why there is no figure, if there is
  // none.
  std::optional<std::string> measure() {
    Range r;
    uint32_t shortest = ~uint32_t{0}, longest = 0;
    for (const Runs* side : {&baseline_, &candidate_}) {
      for (const Subject& s : side->subjects) {
        if (s.losses.step.empty()) return fmt::format("{} has no losses", s.label);
        r.first = std::max(r.first, s.losses.step.front());
        shortest = std::min(shortest, s.losses.step.back());
        longest = std::max(longest, s.losses.step.back());
      }
    }
    r.end = shortest + 1;
    if (shortest < r.first) return "the runs have no steps in common";
    if (longest - shortest > (longest + 1) / 100) {
      compared_.push_back(
          {"lengths-differ", Severity::kNote, "all", r.end, std::nullopt,
           fmt::format("the shortest run ends at step {}, the longest at step {}", shortest, longest),
           "only the steps that all runs have are compared"});
    }
    r.tail = r.end - static_cast<uint32_t>(std::floor(options_.tail * static_cast<double>(r.end - r.first)));
    for (const Runs* side : {&baseline_, &candidate_}) {
      for (const Subject& s : side->subjects) {
        const auto part = s.losses.between(r.tail, r.end);
        const size_t n = finite(part.loss).size();
        if (2 * n < part.loss.size())
          return fmt::format("most losses in the tail of {} are not finite", s.label);
        if (n < kLeastTail) {
          return fmt::format(
              "{} has {} losses in the last {:.0f} % of the common steps; at least {} are needed", s.label, n,
              100 * options_.tail, kLeastTail);
        }
      }
    }
    c_.range = r;
    countSide(&baseline_);
    countSide(&candidate_);

    const Moments b = moments(baseline_.tails), k = moments(candidate_.tails);
    Difference d;
    d.baseline = b.mean;
    d.candidate = k.mean;
    d.value = k.mean - b.mean;
    const Curve curve(baseline_.counted.front()->losses.between(r.first, r.end), r.tail);
    d.margin = options_.margin * std::fabs(b.mean);
    if (options_.margin_absolute) d.margin = *options_.margin_absolute;
    if (options_.margin_steps) {
      const auto above = curve.above(*options_.margin_steps);
      if (!above || !(*above > 0)) {
        return fmt::format(
            "the baseline's loss {} steps before its end is not above its last: a margin of so many steps "
            "means "
            "nothing here",
            *options_.margin_steps);
      }
      d.margin = *above;
    }
    d.margin_steps = curve.stepsTo(d.margin);
    d.steps = curve.stepsTo(d.value);

    const auto drop = lossDrop(baseline_.counted.front()->losses.between(r.first, r.end));
    const double fell = drop ? drop->drop : 0;
    d.gross = options_.gross * std::max(std::fabs(b.mean), fell);
    checkPower(drop, d.margin);
    withinRuns(&d);
    noiseFloor();
    estimate(&d);
    std::vector<const Subject*> partners(pairs_);
    if (c_.paired != partners.size()) partners.clear();
    findBiasGrows(baseline_.counted, candidate_.counted, partners, r, c_.noise, d.margin, &compared_);
    c_.difference = d;
    return std::nullopt;
  }

  void checkPower(const std::optional<LossDrop>& drop, double margin) {
    if (drop && drop->drop > kLeastDrop * margin && drop->drop > 3 * drop->standard_error) return;
    Finding f{"never-trained", Severity::kRefusal, baseline_.counted.front()->label, std::nullopt,
              std::nullopt};
    f.evidence = drop ? fmt::format(
                            "over the compared steps the baseline's loss fell by {:.3g} (standard error "
                            "{:.2g}); the margin is {:.3g}, "
                            "and {:.0f} margins are needed",
                            drop->drop, drop->standard_error, margin, kLeastDrop)
                      : "fewer than 20 losses are compared";
    f.cause = "a candidate that learns nothing would pass: train for longer, or give a smaller --margin";
    const auto same = [&](const Finding& x) { return x.name == f.name && x.run == f.run; };
    if (std::none_of(alone_[0].begin(), alone_[0].end(), same)) compared_.push_back(std::move(f));
  }

  // What one run's own fluctuation says of the difference: step by step where the batches are the same, else
  // from each tail. Says nothing of the noise between runs.
  void withinRuns(Difference* d) {
    const Range& r = *c_.range;
    pairs_.assign(candidate_.counted.size(), nullptr);
    std::set<const Subject*> used;
    for (size_t i = 0; i < candidate_.counted.size(); ++i) {
      for (const Subject* b : baseline_.counted) {
        if (used.contains(b) || !readSameBatches(*b->run, *candidate_.counted[i]->run, r.first, r.end))
          continue;
        pairs_[i] = b;
        used.insert(b);
        ++c_.paired;
        break;
      }
    }
    if (candidate_.counted.size() == 1 && baseline_.counted.size() == 1 && c_.paired == 1) {
      const auto x = baseline_.counted[0]->losses.between(r.tail, r.end);
      const auto y = candidate_.counted[0]->losses.between(r.tail, r.end);
      std::vector<double> gaps;
      for (size_t i = 0; i < std::min(x.loss.size(), y.loss.size()); ++i)
        gaps.push_back(y.loss[i] - x.loss[i]);
      gaps = finite(gaps);
      d->tau = autocorrelationTime(gaps);
      if (const auto means = batchMeans(gaps)) {
        d->batches = means->batches;
        d->within_run = means->mean.standard_error;
      } else {
        const Moments m = moments(gaps);
        d->within_run = 1.5 * std::sqrt(m.variance * d->tau / static_cast<double>(std::max<size_t>(1, m.n)));
      }
      return;
    }
    double squares = 0;
    for (const Runs* side : {&baseline_, &candidate_}) {
      double side_squares = 0;
      for (const Subject* s : side->counted) {
        const std::vector<double> tail = finite(s->losses.between(r.tail, r.end).loss);
        if (const auto means = batchMeans(tail)) {
          side_squares += means->mean.standard_error * means->mean.standard_error;
        } else {
          const Moments m = moments(tail);
          // A short tail knows its autocorrelation badly.
          side_squares += 2.25 * m.variance * autocorrelationTime(tail) / static_cast<double>(m.n);
        }
      }
      const double n = static_cast<double>(side->counted.size());
      squares += side_squares / (n * n);
    }
    d->within_run = std::sqrt(squares);
  }

  // Noise between runs: from the runs given for it, else from repeats of each side.
  void noiseFloor() {
    const Range& r = *c_.range;
    double squares = 0, df = 0;
    size_t runs = 0;
    const auto pool = [&](const std::vector<double>& tails) {
      if (tails.size() < 2) return;
      const Moments m = moments(tails);
      squares += m.variance * static_cast<double>(m.n - 1);
      df += static_cast<double>(m.n - 1);
      runs += m.n;
    };
    pool(baseline_.tails);
    pool(candidate_.tails);
    if (!noise_.subjects.empty()) {
      for (const Subject& s : noise_.subjects) {
        if (s.losses.step.empty() || s.losses.step.front() > r.tail || s.losses.step.back() + 1 < r.end) {
          noise_problem_ =
              fmt::format("{} does not reach over the tail, steps {} to {}", s.label, r.tail, r.end - 1);
          return;
        }
      }
      countSide(&noise_);
      noise_problem_ = seedProblem();
      if (!noise_problem_.empty()) return;
      // A single baseline that the noise runs are twins of is one more of them.
      std::vector<double> tails = noise_.tails;
      if (baseline_.counted.size() == 1 && startAlike(*baseline_.counted[0]->run, *noise_.counted[0]->run)) {
        tails.push_back(baseline_.tails[0]);
      }
      if (tails.size() < kLeastRuns) {
        noise_problem_ =
            fmt::format("{} noise runs are too few: {} at least, the baseline they are twins of among them",
                        tails.size(), kLeastRuns);
        return;
      }
      pool(tails);
      c_.noise.source = NoiseFloor::Source::kNoiseRuns;
    } else if (baseline_.tails.size() >= kLeastRuns && candidate_.tails.size() >= kLeastRuns) {
      c_.noise.source = NoiseFloor::Source::kRepeats;
    }
    c_.noise.df = df;
    c_.noise.runs = runs;
    c_.noise.sd = df > 0 ? std::sqrt(squares / df) : 0;
  }

  // Twins that share a seed hold no noise of seeds, and say nothing of runs with others.
  std::string seedProblem() const {
    std::optional<int64_t> seed;
    for (const Subject* s : noise_.counted) {
      const auto& of = s->run->ranks.front().header.seed;
      if (!of || (seed && *seed != *of)) return "";
      seed = of;
    }
    for (const Runs* side : {&baseline_, &candidate_}) {
      for (const Subject* s : side->counted) {
        const auto& of = s->run->ranks.front().header.seed;
        if (of && *of != *seed) {
          return fmt::format(
              "all noise runs have the seed {} and {} has {}: the noise between seeds is not in them", *seed,
              s->label, *of);
        }
      }
    }
    return "";
  }

  void estimate(Difference* d) {
    const size_t nb = baseline_.tails.size(), nc = candidate_.tails.size();
    Estimate e;
    e.value = d->value;
    // Pairs that read the same batches are the sharpest, also where noise runs are given: what their gaps
    // share is gone.
    const bool paired = nb == nc && nc >= kLeastRuns && c_.paired == nc;
    if (paired && c_.noise.source != NoiseFloor::Source::kNone) {
      std::vector<double> gaps;
      for (size_t i = 0; i < nc; ++i) {
        const size_t at = std::find(baseline_.counted.begin(), baseline_.counted.end(), pairs_[i]) -
                          baseline_.counted.begin();
        gaps.push_back(candidate_.tails[i] - baseline_.tails[at]);
      }
      const Moments m = moments(gaps);
      d->method = Difference::Method::kPaired;
      e.df = static_cast<double>(m.n - 1);
      e.standard_error = std::sqrt(m.variance / static_cast<double>(m.n));
    } else if (c_.noise.source == NoiseFloor::Source::kNoiseRuns) {
      d->method = Difference::Method::kNoiseFloor;
      e.df = c_.noise.df;
      e.standard_error =
          c_.noise.sd * std::sqrt(1.0 / static_cast<double>(nb) + 1.0 / static_cast<double>(nc));
    } else if (c_.noise.source == NoiseFloor::Source::kRepeats) {
      d->method = Difference::Method::kWelch;
      e = welch(moments(baseline_.tails), moments(candidate_.tails));
    } else {
      const bool known = c_.noise.df > 0 && c_.noise.sd > 0;
      const double sd = known ? c_.noise.sd : d->within_run.value_or(0);
      planRuns(sd, *d);
      c_.runs_needed_is_least = !known;
      return;
    }
    d->interval90 = confidence(e, 2 * kConfidence - 1);
    d->interval_outer = confidence(e, kDifferentConfidence);
    d->p = equivalenceP(e, d->margin);
    // Of one run of two whose difference is what is measured.
    planRuns(paired ? e.standard_error * std::sqrt(static_cast<double>(nc) / 2) : c_.noise.sd, *d);
  }

  // For the difference to be found within the margin, if there is none; or past it, if it is what it seems.
  void planRuns(double sd, const Difference& d) {
    const bool past = std::fabs(d.value) > d.margin;
    c_.runs_needed = past ? runsNeededToDiffer(sd, d.value, d.margin) : runsNeeded(sd, d.margin);
  }

  void judge(const std::optional<std::string>& obstacle) {
    // Hard findings of the candidate that the baseline does not share.
    const Finding* decisive = first(compared_, Severity::kHard);
    for (const Finding& f : alone_[1]) {
      if (decisive != nullptr || f.severity != Severity::kHard) continue;
      const bool shared = std::any_of(alone_[0].begin(), alone_[0].end(), [&](const Finding& b) {
        return b.severity == Severity::kHard && b.name == f.name;
      });
      if (!shared) decisive = &f;
    }
    if (decisive != nullptr) {
      c_.verdict = Verdict::kDifferent;
      c_.reason = fmt::format("{} in the {}", decisive->name, decisive->run);
      return;
    }
    if (obstacle) {
      c_.reason = *obstacle;
      return;
    }
    const Difference& d = *c_.difference;
    const std::string gap = fmt::format("the tail losses differ by {:+.4g} ({:+.2f} %)", d.value,
                                        100 * d.value / std::fabs(d.baseline));
    if (d.interval_outer) {
      if (d.interval_outer->low > d.margin || d.interval_outer->high < -d.margin) {
        c_.verdict = Verdict::kDifferent;
        c_.reason = gap + ", past the margin at 99.5 % confidence";
        return;
      }
    } else if (std::fabs(d.value) > d.gross && std::fabs(d.value) > kGrossErrors * d.within_run.value_or(0) &&
               pastKnownNoise(d)) {
      c_.verdict = Verdict::kDifferent;
      c_.reason = gap + ", past the gross bound";
      return;
    }
    for (const Findings* f : {&compared_, &alone_[1], &alone_[0]}) {
      if (const Finding* refusal = first(*f, Severity::kRefusal)) {
        c_.reason = fmt::format("{}: {} cannot be judged", refusal->name, refusal->run);
        return;
      }
    }
    if (const Finding* hard = first(alone_[0], Severity::kHard)) {
      c_.reason = fmt::format("{} in the {}: there is no sound run to compare with", hard->name, hard->run);
      return;
    }
    const std::string needed =
        c_.runs_needed ? fmt::format("{} {} runs a side decide",
                                     c_.runs_needed_is_least ? "at least" : "about", *c_.runs_needed)
                       : "more than a thousand runs a side would be needed; another --margin decides sooner";
    if (!d.p) {
      c_.reason = !noise_problem_.empty() ? noise_problem_
                  : baseline_.tails.size() == 1 && candidate_.tails.size() == 1
                      ? "one run a side: the noise between runs is not in them, however long they are; " +
                            needed + ", or --noise gives it"
                      : fmt::format("{} and {} runs: {} a side, or --noise, are needed for a verdict; {}",
                                    baseline_.tails.size(), candidate_.tails.size(), kLeastRuns, needed);
      return;
    }
    if (*d.p < 1 - kConfidence) {
      c_.verdict = Verdict::kEquivalent;
      c_.reason = gap + ", within the margin at 95 % confidence";
      return;
    }
    c_.reason = gap + ", and the noise between runs leaves open whether that is within the margin; " + needed;
  }

  // With some repeats the noise between runs is known a little: a gross gap must be past it too.
  bool pastKnownNoise(const Difference& d) const {
    if (!(c_.noise.df > 0)) return true;
    const double error = c_.noise.sd * std::sqrt(1.0 / static_cast<double>(baseline_.tails.size()) +
                                                 1.0 / static_cast<double>(candidate_.tails.size()));
    return std::fabs(d.value) > studentQuantile(0.5 + kDifferentConfidence / 2, c_.noise.df) * error;
  }

  const Inputs& inputs_;
  const CompareOptions& options_;
  Comparison c_;
  Runs baseline_, candidate_, noise_;
  std::vector<const Subject*> pairs_;  // by counted candidate
  Findings alone_[2], compared_;
  std::string noise_problem_;
};

}  // namespace

Comparison compareRuns(const Inputs& inputs, const CompareOptions& options) {
  return Comparing(inputs, options).run();
}

const char* verdictName(Verdict v) {
  static constexpr const char* kNames[] = {"equivalent", "different", "undecided"};
  return kNames[static_cast<int>(v)];
}
const char* severityName(Severity s) {
  static constexpr const char* kNames[] = {"note", "warning", "refusal", "hard"};
  return kNames[static_cast<int>(s)];
}
const char* sideName(Side s) {
  static constexpr const char* kNames[] = {"baseline", "candidate", "noise"};
  return kNames[static_cast<int>(s)];
}
const char* methodName(Difference::Method m) {
  static constexpr const char* kNames[] = {"welch", "paired", "noise-floor", "one-run-a-side"};
  return kNames[static_cast<int>(m)];
}
const char* noiseSourceName(NoiseFloor::Source s) {
  static constexpr const char* kNames[] = {"none", "repeats", "noise-runs"};
  return kNames[static_cast<int>(s)];
}

}  // namespace halfwire::parity
