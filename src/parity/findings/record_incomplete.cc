// record-incomplete: what a record lacks, so that silence is not taken for health.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findRecordIncomplete(const Subject& s, Findings* out) {
  const Run& run = *s.run;
  std::vector<std::string> parts;
  Severity severity = Severity::kNote;
  if (run.source == Source::kRecord) {
    const int64_t world = run.ranks.front().header.world_size;
    if (static_cast<int64_t>(run.ranks.size()) < world) {
      parts.push_back(fmt::format("{} of {} ranks are there", run.ranks.size(), world));
      severity = Severity::kWarning;
    }
    size_t gaps = 0, uneven = 0;
    for (const RankRecord& rank : run.ranks) {
      gaps += rank.step.back() - rank.step.front() + 1 - rank.rows();
      // Ranks of a run that was killed end a step apart.
      if (lastStep(run) - rank.step.back() > 1) ++uneven;
      if (rank.cut_short)
        parts.push_back(fmt::format("the last line of rank {} is cut short and left out", rank.header.rank));
      if (rank.loss.empty()) {
        parts.push_back(fmt::format("rank {} has no loss", rank.header.rank));
        severity = Severity::kWarning;
      }
    }
    if (gaps > 0) {
      parts.push_back(fmt::format("{} steps are missing between others", gaps));
      severity = Severity::kWarning;
    }
    if (uneven > 0) {
      parts.push_back(fmt::format("{} ranks end before step {}", uneven, lastStep(run)));
      severity = Severity::kWarning;
    }
  }
  if (s.losses.loss.size() < 20) {
    parts.push_back(
        fmt::format("{} losses are too few to see whether anything is learnt", s.losses.loss.size()));
  }
  for (const std::string& note : run.notes) parts.push_back(note);
  if (parts.empty()) return;
  Finding f{"record-incomplete", severity, s.label, std::nullopt, std::nullopt};
  for (size_t i = 0; i < std::min<size_t>(parts.size(), 6); ++i) f.evidence += (i > 0 ? "; " : "") + parts[i];
  if (parts.size() > 6) f.evidence += fmt::format("; and {} more", parts.size() - 6);
  f.cause = "findings that need what is missing are not looked for";
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
