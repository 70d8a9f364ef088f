// step0-no-op: the first update of a fresh run changed nothing. A schedule whose factor at step 0 is 0 does
// that; torch's LambdaLR applies that factor when it is made.
#include <fmt/format.h>

#include "parity/findings/findings.h"

namespace halfwire::parity {
namespace {

struct First {
  bool gradient = false;  // some gradient was recorded and is not zero
  bool update_known = false;
  bool update = false;
  bool lr_known = false;
  bool lr = false;
};

First look(const RankRecord& rank, size_t row) {
  First f;
  for (const Group& g : rank.groups) {
    if (g.grad_norm[row] > 0) f.gradient = true;
    if (!std::isnan(g.update_norm[row])) {
      f.update_known = true;
      if (g.update_norm[row] != 0) f.update = true;
    }
    if (!std::isnan(g.lr[row])) {
      f.lr_known = true;
      if (g.lr[row] != 0) f.lr = true;
    }
  }
  return f;
}

bool lost(const First& f) {
  if (f.update_known && f.update) return false;
  return (f.lr_known && !f.lr) || (f.update_known && f.gradient);
}

}  // namespace

void findStep0NoOp(const Subject& s, Findings* out) {
  if (!s.run->ratesAreExact()) return;
  const RankRecord& rank = s.run->ranks.front();
  if (rank.step.front() != 0 || rank.header.resumed_from.value_or(0) > 0) return;
  const First first = look(rank, 0);
  // A step that a loss scaler skipped lost its update for another reason; a rate of 0 is seen there too.
  if (skippedOrBad(rank, 0) && !(first.lr_known && !first.lr)) return;
  const bool no_gradient_known = !first.gradient && !std::isnan(joinedNorm(*s.run, 0, &Group::grad_norm));
  if (!lost(first) || no_gradient_known) return;

  size_t updates = 0;
  while (updates < rank.rows()) {
    const First at = look(rank, updates);
    if (!lost(at) || (skippedOrBad(rank, updates) && !(at.lr_known && !at.lr))) break;
    ++updates;
  }
  // A run that never moves, at rates above 0, is update-zero.
  if (updates == rank.rows() && first.lr) return;
  if (first.lr && updates > 1) return;

  const double after = updates < rank.rows() ? rate(rank, updates) : kAbsent;
  const double later = updates + 1 < rank.rows() ? rate(rank, updates + 1) : kAbsent;
  const bool rises = first.lr_known && !first.lr && later > after * (1 + 1e-9);
  const bool told = first.lr_known && !first.lr && rank.header.warmup.value_or(0) >= 2;
  Finding f{"step0-no-op", rises || told ? Severity::kWarning : Severity::kHard, s.label, 0,
            rank.header.rank};
  const uint64_t of = static_cast<uint64_t>(rank.step.back()) + 1;
  f.evidence = fmt::format(
      "{} of {} updates lost: at step 0 the learning rate is {:.6g}, the gradient's norm {:.6g}, the "
      "update's {:.6g}",
      updates, of, rate(rank, 0), joinedNorm(*s.run, 0, &Group::grad_norm),
      joinedNorm(*s.run, 0, &Group::update_norm));
  if (rises || told) {
    f.cause = "a warm-up that starts at 0; start it at (step + 1) / warmup if the lost update is not meant";
  } else if (first.lr_known && !first.lr) {
    f.cause =
        "the schedule's factor at step 0 is 0 and the scheduler applied it when it was made (LambdaLR does), "
        "with no "
        "warm-up that would explain it";
  } else {
    f.cause = "the optimizer's first step did not reach the parameters, though the rate is not 0";
  }
  out->push_back(std::move(f));
}

}  // namespace halfwire::parity
