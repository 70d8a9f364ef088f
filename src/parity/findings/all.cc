// Every finding, in the order in which causes come before what they cause.
#include <algorithm>

#include "parity/findings/findings.h"

namespace halfwire::parity {

Findings findAlone(const Subject& s) {
  Findings found;
  findStep0NoOp(s, &found);
  findUpdateZero(s, &found);
  findGradientsNotReduced(s, &found);
  findReplicasApart(s, &found);
  findTyingLost(s, &found);
  findWarmupStretched(s, &found);
  findVanishingUpdates(s, &found);
  findLossScaleStuck(s, &found);
  findStepsSkipped(s, &found);
  findLossNotFinite(s, &found);
  findDataRepeats(s, &found);
  findDataSameOnRanks(s, &found);
  findDropoutIdentical(s, &found);
  findNeverTrained(s, &found);
  findRecordIncomplete(s, &found);
  return found;
}

Findings findCompared(const Subject& baseline, const Subject& candidate) {
  Findings found;
  findScheduleDifferences(baseline, candidate, &found);
  findGradientsScaled(baseline, candidate, &found);
  findClippingChanged(baseline, candidate, &found);
  findDataOrder(baseline, candidate, &found);
  findStatePrecisionLowered(baseline, candidate, &found);
  findDropoutBecameIdentical(baseline, candidate, &found);
  return found;
}

}  // namespace halfwire::parity
