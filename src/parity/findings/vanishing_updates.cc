// state-low-precision and updates-vanish: updates that rounding swallows.
#include <fmt/format.h>

#include <vector>

#include "parity/findings/findings.h"
#include "parity/statistics.h"

namespace halfwire::parity {
namespace {

const char* typeName(uint8_t type) {
  static constexpr const char* kNames[] = {"int8", "float8", "bfloat16", "float16", "float32", "float64"};
  return type < std::size(kNames) ? kNames[type] : "unknown";
}

uint8_t lowestState(const RankRecord& rank) {
  uint8_t lowest = kUnknown;
  for (const Group& g : rank.groups) {
    for (size_t row = 0; row < rank.rows() && !g.state_dtype.empty(); ++row) {
      lowest = std::min(lowest, g.state_dtype[row]);
    }
  }
  return lowest;
}

bool isLow(uint8_t state) { return state < static_cast<uint8_t>(StateType::kFloat32); }

// The median share of elements left as they were, over the second half of the run, where the rate is at
// least a tenth of its largest: at the end of a decay to 0 nothing moves in any precision.
struct Unchanged {
  double share = kAbsent;
  uint32_t step = 0;
};
Unchanged unchangedShare(const RankRecord& rank) {
  Unchanged u;
  double largest = 0;
  for (size_t row = 0; row < rank.rows(); ++row) largest = std::max(largest, rate(rank, row));
  for (const Group& g : rank.groups) {
    std::vector<double> shares;
    uint32_t first = 0;
    for (size_t row = rank.rows() / 2; row < rank.rows(); ++row) {
      const double share = g.unchanged[row];
      if (std::isnan(share) || !(g.lr[row] >= 0.1 * largest) || !(g.lr[row] > 0) || skippedOrBad(rank, row))
        continue;
      if (shares.empty()) first = rank.step[row];
      shares.push_back(share);
    }
    if (shares.size() < 3) continue;
    const double share = median(shares);
    if (!(share <= u.share)) u = {share, first};
  }
  return u;
}

}  // namespace

void findVanishingUpdates(const Subject& s, Findings* out) {
  for (const RankRecord& rank : s.run->ranks) {
    const uint8_t state = lowestState(rank);
    const Unchanged u = unchangedShare(rank);
    const bool vanish = u.share >= 0.5;
    if (isLow(state)) {
      // Eight-bit states carry scales of their own; parameters beside a master copy in 32 bits do not move
      // often.
      const bool sixteen = state == static_cast<uint8_t>(StateType::kBfloat16) ||
                           state == static_cast<uint8_t>(StateType::kFloat16);
      Finding f{"state-low-precision",
                vanish && sixteen && rank.header.precision != "mixed" ? Severity::kHard : Severity::kNote,
                s.label, vanish ? u.step : rank.step.front(), rank.header.rank};
      f.evidence = fmt::format("the optimizer's state is {}", typeName(state));
      if (!std::isnan(u.share)) {
        f.evidence += fmt::format(
            "; {:.0f} % of the sampled elements keep their bits in an update though their gradient is not "
            "zero",
            100 * u.share);
      }
      f.cause = vanish ? "updates are smaller than the parameters' or the state's last place: keep both, or "
                         "a master copy, in "
                         "32 bits"
                       : "second moments in 16 bits or less stop following the gradient; no harm is seen in "
                         "the record";
      out->push_back(std::move(f));
      return;
    }
    if (vanish && rank.header.precision != "mixed") {
      Finding f{"updates-vanish", Severity::kWarning, s.label, u.step, rank.header.rank};
      f.evidence = fmt::format(
          "{:.0f} % of the sampled elements keep their bits in an update though their gradient is not zero",
          100 * u.share);
      f.cause =
          "updates are smaller than the parameters' last place; harmless where the optimizer keeps a master "
          "copy in 32 bits";
      out->push_back(std::move(f));
      return;
    }
  }
}

void findStatePrecisionLowered(const Subject& baseline, const Subject& candidate, Findings* out) {
  const RankRecord& rank = candidate.run->ranks.front();
  const uint8_t before = lowestState(baseline.run->ranks.front());
  const uint8_t now = lowestState(rank);
  if (before == kUnknown || !isLow(now) || now >= before) return;
  Finding f{"state-low-precision", Severity::kWarning, candidate.label, rank.step.front(), rank.header.rank};
  f.evidence = fmt::format("the optimizer's state is {}, the baseline's {}", typeName(now), typeName(before));
  f.cause = "the candidate keeps the optimizer's state in fewer bits; small updates may vanish";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
