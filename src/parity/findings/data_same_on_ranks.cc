// data-same-on-ranks: ranks read the same batches.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findDataSameOnRanks(const Subject& s, Findings* out) {
  const Run& run = *s.run;
  const RankRecord& first = run.ranks.front();
  size_t compared = 0, same = 0;
  for (size_t row = 0; row < first.rows(); ++row) {
    const uint64_t hash = first.batch_hash[row];
    for (size_t r = 1; r < run.ranks.size() && hash != kNoHash; ++r) {
      const auto at = run.ranks[r].row(first.step[row]);
      if (!at || run.ranks[r].batch_hash[*at] == kNoHash) continue;
      ++compared;
      same += run.ranks[r].batch_hash[*at] == hash;
    }
  }
  if (compared < 3 || same < compared) return;
  Finding f{"data-same-on-ranks", Severity::kWarning, s.label, first.step.front(), std::nullopt};
  f.evidence = fmt::format("all {} ranks read the same batch at every step", run.ranks.size());
  f.cause =
      "the data are not split among the ranks (a DistributedSampler is missing); meant so under tensor "
      "parallelism";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
