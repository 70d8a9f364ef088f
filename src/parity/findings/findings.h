// What can be wrong with a training run, by name. One file finds one thing; docs/parity.md lists the names,
// when each is seen and how severe it is. All are pure functions of the records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parity/series.h"

namespace halfwire::parity {

enum class Severity {
  kNote,
  kWarning,
  kRefusal,  // the run cannot be judged: a verdict is refused
  kHard,     // decides: the run does not do what it should, or not what the baseline does
};

struct Finding {
  std::string name;
  Severity severity = Severity::kNote;
  std::string run;
  std::optional<int64_t> step;  // first seen
  std::optional<int64_t> rank;
  std::string evidence;
  std::string cause;
};
using Findings = std::vector<Finding>;

// Of one run alone.
void findStep0NoOp(const Subject& s, Findings* out);
void findUpdateZero(const Subject& s, Findings* out);
void findVanishingUpdates(const Subject& s, Findings* out);  // state-low-precision, updates-vanish
void findGradientsNotReduced(const Subject& s, Findings* out);
void findReplicasApart(const Subject& s, Findings* out);
void findDropoutIdentical(const Subject& s, Findings* out);
void findDataSameOnRanks(const Subject& s, Findings* out);
void findDataRepeats(const Subject& s, Findings* out);
void findLossScaleStuck(const Subject& s, Findings* out);
void findStepsSkipped(const Subject& s, Findings* out);
void findLossNotFinite(const Subject& s, Findings* out);
void findTyingLost(const Subject& s, Findings* out);
void findWarmupStretched(const Subject& s, Findings* out);  // schedule-stretched, from the header
void findRecordIncomplete(const Subject& s, Findings* out);
void findNeverTrained(const Subject& s, Findings* out);
Findings findAlone(const Subject& s);

// Of a candidate beside a baseline; `paired` where both read the same batches at every step.
void findScheduleDifferences(const Subject& baseline, const Subject& candidate, Findings* out);
void findGradientsScaled(const Subject& baseline, const Subject& candidate, Findings* out);
void findClippingChanged(const Subject& baseline, const Subject& candidate, Findings* out);
void findDataOrder(const Subject& baseline, const Subject& candidate, Findings* out);
void findStatePrecisionLowered(const Subject& baseline, const Subject& candidate, Findings* out);
void findDropoutBecameIdentical(const Subject& baseline, const Subject& candidate, Findings* out);
Findings findCompared(const Subject& baseline, const Subject& candidate);

// The mean loss of the first 20th (at least five values) less that of the last fifth, with its standard
// error; nothing below 20 finite values.
struct LossDrop {
  double head = 0;
  double tail = 0;
  double drop = 0;
  double standard_error = 0;
};
std::optional<LossDrop> lossDrop(LossSeries::Part part);

}  // namespace halfwire::parity
