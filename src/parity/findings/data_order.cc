// data-order-differs, and data-repeats beside a baseline: batches that part from the baseline's.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findDataOrder(const Subject& baseline, const Subject& candidate, Findings* out) {
  const RankRecord& b = baseline.run->ranks.front();
  const RankRecord& c = candidate.run->ranks.front();
  if (b.batch_hash.empty() || c.batch_hash.empty()) return;
  if (b.header.world_size != c.header.world_size || b.header.accumulation != c.header.accumulation) return;
  size_t agree = 0, later = 0, compared = 0;
  std::optional<size_t> parted;
  for (size_t row = 0; row < c.rows(); ++row) {
    const auto at = b.row(c.step[row]);
    if (!at || b.batch_hash[*at] == kNoHash || c.batch_hash[row] == kNoHash) continue;
    ++compared;
    const bool same = b.batch_hash[*at] == c.batch_hash[row];
    if (!same && !parted) parted = row;
    if (same) (parted ? later : agree) += 1;
  }
  if (!parted || compared == 0) return;
  const bool same_seed = b.header.seed && c.header.seed && *b.header.seed == *c.header.seed;
  const bool other_seed = b.header.seed && c.header.seed && *b.header.seed != *c.header.seed;
  if (other_seed || (!same_seed && agree == 0)) return;

  const uint32_t step = c.step[*parted];
  // The parting lies at a resume of the candidate that the baseline does not have.
  bool resumed = c.header.resumed_from.value_or(0) > 0 && *parted == 0;
  for (const Resume& r : c.resumes) resumed = resumed || r.row == *parted;
  for (const Resume& r : b.resumes) resumed = resumed && r.step != step;

  // Are these batches that the baseline read before?
  std::vector<std::pair<uint64_t, uint32_t>> seen;
  for (size_t row = 0; row < b.rows(); ++row) {
    if (b.batch_hash[row] != kNoHash) seen.emplace_back(b.batch_hash[row], b.step[row]);
  }
  std::sort(seen.begin(), seen.end());
  size_t known = 0, looked = 0, earlier = 0;
  std::optional<uint32_t> from;
  for (size_t row = *parted; row < c.rows(); ++row) {
    const uint64_t hash = c.batch_hash[row];
    if (hash == kNoHash) continue;
    ++looked;
    const auto at = std::lower_bound(seen.begin(), seen.end(), std::pair(hash, uint32_t{0}));
    if (at == seen.end() || at->first != hash) continue;
    ++known;
    if (at->second < step) ++earlier;
    if (!from) from = at->second;
  }
  Finding f{"data-order-differs", resumed ? Severity::kHard : Severity::kWarning, candidate.label, step,
            c.header.rank};
  f.evidence = fmt::format(
      "batches equal the baseline's at {} steps and part at step {}; {} of the {} batches from there on are "
      "the baseline's at other steps",
      agree, step, known, looked);
  f.cause = resumed ? "the data loader was not brought to where it was when the checkpoint was written"
                    : "the order of the data depends on more than the seed: workers, number of ranks, or a "
                      "shuffle that is seeded elsewhere";
  const size_t first_few = std::min<size_t>(looked, 3);
  if (resumed && earlier >= std::max<size_t>(first_few, 1) && from && *from < step) {
    f.name = "data-repeats";
    f.evidence = fmt::format("after the resume at step {} the batches are the baseline's from step {} on",
                             step, *from);
    f.cause =
        "the data loader starts again instead of going on: its position is not in the checkpoint, or is not "
        "restored";
  }
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
