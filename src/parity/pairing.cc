#include "parity/pairing.h"

#include <algorithm>

namespace halfwire::parity {
namespace {

template <class T>
bool agree(const std::optional<T>& a, const std::optional<T>& b) {
  return !a || !b || *a == *b;
}

bool headersAgree(const Run& a, const Run& b) {
  const Header& x = a.ranks.front().header;
  const Header& y = b.ranks.front().header;
  return x.world_size == y.world_size && agree(x.seed, y.seed) && agree(x.accumulation, y.accumulation) &&
         agree(x.elements, y.elements) && a.ranks.size() == b.ranks.size();
}

double apart(double a, double b) {
  if (a == b) return 0;
  const double most = std::max(std::fabs(a), std::fabs(b));
  return std::isfinite(a) && std::isfinite(b) ? std::fabs(a - b) / most : 1;
}

// Collects the first difference of any size, and the first of more than 1 %.
class Partings {
 public:
  Partings(const std::string& baseline, const std::string& candidate) {
    bits_.baseline = past_.baseline = baseline;
    bits_.candidate = past_.candidate = candidate;
    past_.past_one_percent = true;
  }
  void at(uint32_t step, int64_t rank) {
    step_ = step;
    rank_ = rank;
  }
  void real(const char* name, double a, double b) {
    if (std::isnan(a) || std::isnan(b)) return;
    const double d = apart(a, b);
    if (d > 0 && !have_bits_) set(&bits_, &have_bits_, name, a, b);
    if (d > 0.01 && !have_past_) set(&past_, &have_past_, name, a, b);
  }
  // A hash that differs has no size; batches that differ are past any bound.
  void hash(const char* name, uint64_t a, uint64_t b, bool decisive) {
    if (a == kNoHash || b == kNoHash || a == b) return;
    if (!have_bits_) set(&bits_, &have_bits_, name, kAbsent, kAbsent);
    if (decisive && !have_past_) set(&past_, &have_past_, name, kAbsent, kAbsent);
  }
  bool done() const { return have_bits_ && have_past_; }
  std::vector<Parting> take() {
    std::vector<Parting> all;
    if (have_bits_) all.push_back(bits_);
    if (have_past_) all.push_back(past_);
    return all;
  }

 private:
  void set(Parting* to, bool* have, const char* name, double a, double b) {
    to->step = step_;
    to->rank = rank_;
    to->quantity = name;
    to->from = a;
    to->to = b;
    *have = true;
  }
  Parting bits_, past_;
  bool have_bits_ = false, have_past_ = false;
  uint32_t step_ = 0;
  int64_t rank_ = 0;
};

}  // namespace

bool readSameBatches(const Run& a, const Run& b, uint32_t first, uint32_t end) {
  if (!headersAgree(a, b)) return false;
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    const RankRecord& x = a.ranks[r];
    const RankRecord& y = b.ranks[r];
    if (x.header.rank != y.header.rank) return false;
    size_t compared = 0;
    for (size_t row = 0; row < x.rows(); ++row) {
      if (x.step[row] < first || x.step[row] >= end) continue;
      const auto at = y.row(x.step[row]);
      if (!at || x.batch_hash[row] == kNoHash || x.batch_hash[row] != y.batch_hash[*at]) return false;
      ++compared;
    }
    if (compared == 0) return false;
  }
  return true;
}

bool startAlike(const Run& a, const Run& b) {
  const RankRecord& x = a.ranks.front();
  const RankRecord& y = b.ranks.front();
  if (x.header.seed && y.header.seed) return *x.header.seed == *y.header.seed;
  const uint32_t first = std::max(x.step.front(), y.step.front());
  const auto i = x.row(first), j = y.row(first);
  return i && j && x.batch_hash[*i] != kNoHash && x.batch_hash[*i] == y.batch_hash[*j];
}

std::vector<Parting> partingsOf(const Subject& baseline, const Subject& candidate) {
  Partings p(baseline.label, candidate.label);
  const Run& b = *baseline.run;
  const Run& c = *candidate.run;
  const RankRecord& lead = c.ranks.front();
  for (size_t row = 0; row < lead.rows() && !p.done(); ++row) {
    const uint32_t step = lead.step[row];
    const size_t ranks = std::min(b.ranks.size(), c.ranks.size());
    // In the order in which a step computes them, so that the first is the cause of those after it.
    const auto each = [&](auto look) {
      for (size_t r = 0; r < ranks; ++r) {
        const auto i = b.ranks[r].row(step), j = c.ranks[r].row(step);
        if (!i || !j) continue;
        p.at(step, c.ranks[r].header.rank);
        look(b.ranks[r], *i, c.ranks[r], *j);
      }
    };
    const auto groups = [&](auto look) {
      each([&](const RankRecord& x, size_t i, const RankRecord& y, size_t j) {
        for (size_t g = 0; g < std::min(x.groups.size(), y.groups.size()); ++g)
          look(x.groups[g], i, y.groups[g], j);
      });
    };
    each([&](const RankRecord& x, size_t i, const RankRecord& y, size_t j) {
      p.hash("batch_hash", x.batch_hash[i], y.batch_hash[j], true);
      p.hash("rng_hash", x.rng_hash[i], y.rng_hash[j], false);
      p.real("loss", x.loss[i], y.loss[j]);
      p.real("loss_scale", x.loss_scale[i], y.loss_scale[j]);
    });
    groups([&](const Group& x, size_t i, const Group& y, size_t j) {
      p.real("grad_norm", x.grad_norm[i], y.grad_norm[j]);
    });
    groups([&](const Group& x, size_t i, const Group& y, size_t j) {
      p.real("grad_norm_clipped", x.grad_norm_clipped[i], y.grad_norm_clipped[j]);
      p.hash("grad_hash", x.grad_hash[i], y.grad_hash[j], false);
      p.real("lr", x.lr[i], y.lr[j]);
    });
    groups([&](const Group& x, size_t i, const Group& y, size_t j) {
      p.real("update_norm", x.update_norm[i], y.update_norm[j]);
      p.real("param_norm", x.param_norm[i], y.param_norm[j]);
      p.hash("param_hash", x.param_hash[i], y.param_hash[j], false);
    });
  }
  return p.take();
}

}  // namespace halfwire::parity
