// data-repeats: batches that were seen before. Epochs repeat data on purpose; a loader that starts again at a
// resume does not.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

// For each row the latest earlier row with the same batch, or kNone.
std::vector<uint32_t> earlierRows(const RankRecord& rank) {
  std::vector<std::pair<uint64_t, uint32_t>> sorted;
  sorted.reserve(rank.rows());
  for (size_t row = 0; row < rank.rows(); ++row) {
    if (rank.batch_hash[row] != kNoHash)
      sorted.emplace_back(rank.batch_hash[row], static_cast<uint32_t>(row));
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<uint32_t> earlier(rank.rows(), kNone);
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first == sorted[i - 1].first) earlier[sorted[i].second] = sorted[i - 1].second;
  }
  return earlier;
}

// At a resume: the batches from `row` on are those from `start` on, for `length` rows.
struct Restart {
  size_t row = 0, start = 0, length = 0;
};
std::optional<Restart> restartAt(const std::vector<uint32_t>& earlier, size_t row) {
  Restart r{row, 0, 0};
  if (row >= earlier.size() || earlier[row] == kNone) return std::nullopt;
  r.start = earlier[row];
  while (row + r.length < earlier.size() && earlier[row + r.length] == r.start + r.length) ++r.length;
  // Three in a row, or all there are.
  if (r.length < 3 && row + r.length < earlier.size()) return std::nullopt;
  return r;
}

}  // namespace

void findDataRepeats(const Subject& s, Findings* out) {
  const RankRecord& rank = s.run->ranks.front();
  if (rank.batch_hash.empty()) return;
  const std::vector<uint32_t> earlier = earlierRows(rank);
  const auto first = std::find_if(earlier.begin(), earlier.end(), [](uint32_t e) { return e != kNone; });
  if (first == earlier.end()) return;
  const size_t first_row = first - earlier.begin();
  Finding f{"data-repeats", Severity::kNote, s.label, rank.step[first_row], rank.header.rank};

  for (const Resume& resume : rank.resumes) {
    const auto restart = restartAt(earlier, resume.row);
    if (!restart) continue;
    // The end of an epoch explains a restart at the first batch, if nothing new comes after it and the epochs
    // before it had this length.
    const size_t after = restart->row + restart->length;
    const bool new_data_after = after < earlier.size() && earlier[after] == kNone;
    const bool repeated_before = first_row < resume.row;
    const size_t period = repeated_before ? first_row - *first : resume.row;
    const bool at_epoch = repeated_before ? resume.row % period == 0 && restart->start + period == resume.row
                                          : restart->start == 0;
    f.severity = new_data_after || !at_epoch ? Severity::kHard : Severity::kWarning;
    f.step = rank.step[resume.row];
    f.evidence = fmt::format(
        "after the resume at step {} the batches are those of step {} on, {} in a row{}", *f.step,
        rank.step[restart->start], restart->length,
        new_data_after ? "; then come batches that were never read, so the data were not used up" : "");
    f.cause = f.severity == Severity::kHard
                  ? "the data loader starts again instead of going on: its position is not in the "
                    "checkpoint, or is not restored"
                  : "an epoch ended at the resume, or the data loader starts again instead of going on";
    out->push_back(std::move(f));
    return;
  }

  size_t repeats = 0, next = 0;
  for (size_t row = 0; row < earlier.size(); ++row) {
    if (earlier[row] == kNone) continue;
    ++repeats;
    next += row - earlier[row] == 1;
  }
  const size_t period = first_row - *first;
  size_t periodic = 0;
  for (size_t row = first_row; row < earlier.size(); ++row) periodic += earlier[row] + period == row;
  const double share = static_cast<double>(repeats) / static_cast<double>(rank.rows());
  if (next >= 3) {
    f.severity = Severity::kWarning;
    f.evidence = fmt::format("{} of {} steps read the batch of the step before", next, rank.rows());
    f.cause = "an iterator that is made anew for every step, or one batch on purpose";
  } else if (10 * periodic >= 9 * (earlier.size() - first_row)) {
    f.evidence = fmt::format("the same batches in the same order every {} steps", period);
    f.cause = "epochs without shuffling, or a sampler whose epoch is not set";
  } else if (share > 0.01) {
    f.severity = Severity::kWarning;
    f.evidence = fmt::format("{} of {} batches were read before, at no fixed distance", repeats, rank.rows());
    f.cause = "sampling with replacement, or several readers of one shard";
  } else {
    return;
  }
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
