// tying-lost: weights that should be one tensor have become two.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {

void findTyingLost(const Subject& s, Findings* out) {
  for (const RankRecord& rank : s.run->ranks) {
    for (size_t row = 0; row < rank.rows() && !rank.tied_apart.empty(); ++row) {
      const uint32_t apart = rank.tied_apart[row];
      if (apart == kNoCount || apart == 0) continue;
      Finding f{"tying-lost", Severity::kHard, s.label, rank.step[row], rank.header.rank};
      f.evidence = fmt::format("{} of {} tied pairs hold different values after step {}", apart,
                               rank.header.tied.value_or(apart), rank.step[row]);
      f.cause =
          "a conversion, a wrapper or a loaded checkpoint made two tensors of one, and they are updated "
          "apart";
      out->push_back(std::move(f));
      return;
    }
    for (const Resume& at : rank.resumes) {
      if (!rank.header.tied || !at.tied || *at.tied >= *rank.header.tied) continue;
      Finding f{"tying-lost", Severity::kHard, s.label, at.step, rank.header.rank};
      f.evidence =
          fmt::format("{} pairs of parameters shared memory at the start, {} after the resume at step {}",
                      *rank.header.tied, *at.tied, at.step);
      f.cause = "the checkpoint was loaded into two tensors; tie them again after loading";
      out->push_back(std::move(f));
      return;
    }
    const bool none = rank.header.tied && *rank.header.tied == 0;
    if (!rank.header.tied_expected.value_or(false) || !none) continue;
    // A shard holds one of the two at most.
    Finding f{"tying-lost", sharded(*s.run) ? Severity::kWarning : Severity::kHard, s.label, std::nullopt,
              rank.header.rank};
    f.evidence = "the model's configuration asks for tied weights, and no two parameters share memory";
    f.cause =
        "the model was moved, wrapped or loaded in a way that copies tied weights; tie them again afterwards";
    out->push_back(std::move(f));
    return;
  }
}

}  // namespace halfwire::parity
