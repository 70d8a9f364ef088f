// dropout-identical: all ranks draw dropout from the same random state, so that masks repeat across ranks.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

struct Same {
  size_t compared = 0;
  size_t same = 0;
  uint32_t step = 0;
};

// Steps at which two ranks start from the same random state though they read different batches. Ranks with
// the same batch (tensor parallel) share their dropout on purpose.
Same sameStates(const Run& run) {
  Same s;
  const RankRecord& first = run.ranks.front();
  for (size_t row = 0; row < first.rows(); ++row) {
    const uint64_t state = first.rng_hash[row];
    if (state == kNoHash) continue;
    bool compared = false, same = true;
    for (size_t r = 1; r < run.ranks.size(); ++r) {
      const RankRecord& other = run.ranks[r];
      const auto at = other.row(first.step[row]);
      if (!at || other.rng_hash[*at] == kNoHash) continue;
      if (first.batch_hash[row] != kNoHash && first.batch_hash[row] == other.batch_hash[*at]) continue;
      compared = true;
      same = same && other.rng_hash[*at] == state;
    }
    if (!compared) continue;
    if (same && s.same == 0) s.step = first.step[row];
    s.same += same;
    ++s.compared;
  }
  return s;
}

bool identical(const Run& run, Same* s) {
  if (run.ranks.size() < 2 || !(run.ranks.front().header.dropout.value_or(0) > 0)) return false;
  *s = sameStates(run);
  return s->compared > 0 && 10 * s->same >= 9 * s->compared;
}

void report(const Subject& who, const Same& s, Severity severity, const char* more, Findings* out) {
  Finding f{"dropout-identical", severity, who.label, s.step, std::nullopt};
  f.evidence = fmt::format(
      "the ranks' random states are equal at {} of {} steps, with different batches and a dropout of {}{}",
      s.same, s.compared, *who.run->ranks.front().header.dropout, more);
  f.cause = "every rank was seeded alike: add the rank to the seed that dropout draws from";
  out->push_back(std::move(f));
}

}  // namespace

void findDropoutIdentical(const Subject& s, Findings* out) {
  Same same;
  if (identical(*s.run, &same)) report(s, same, Severity::kWarning, "", out);
}

void findDropoutBecameIdentical(const Subject& baseline, const Subject& candidate, Findings* out) {
  Same same, before;
  if (!identical(*candidate.run, &same)) return;
  if (baseline.run->ranks.size() < 2 || identical(*baseline.run, &before) || before.compared == 0) return;
  report(candidate, same, Severity::kHard, "; the baseline's are not", out);
}

}  // namespace halfwire::parity
