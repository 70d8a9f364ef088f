#include "trainer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "halfwire/parity.h"

namespace halfwire::zoo {
namespace {

constexpr size_t kVocabulary = 32, kContext = 2, kWidth = 16, kHidden = 32;
constexpr size_t kPositions = 12288;  // 192 or 96 updates an epoch
constexpr size_t kBlock = 128;

class Random {
 public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  uint64_t state;
};

// The text: the next letter follows from the last, from the one before, or from neither.
struct Text {
  Text() {
    Random random(42);
    std::array<uint8_t, kVocabulary> first, second;
    std::iota(first.begin(), first.end(), 0);
    std::iota(second.begin(), second.end(), 0);
    for (size_t i = kVocabulary - 1; i > 0; --i) {
      std::swap(first[i], first[random.below(i + 1)]);
      std::swap(second[i], second[random.below(i + 1)]);
    }
    letters.resize(kPositions + kContext + 1);
    for (size_t i = 0; i < letters.size(); ++i) {
      const float u = random.uniform();
      letters[i] = i < kContext || u > 0.85f ? random.below(kVocabulary)
                   : u < 0.6f                ? first[letters[i - 1]]
                                             : second[letters[i - 2]];
    }
  }
  std::vector<uint8_t> letters;
};

// Where each tensor lies in a replica's memory. Tied: the head is the embedding.
struct Layout {
  explicit Layout(bool tied)
      : head(tied ? embedding : kUntied), total(tied ? kUntied : kUntied + kVocabulary * kWidth) {}
  static constexpr size_t embedding = 0;
  static constexpr size_t hidden = embedding + kVocabulary * kWidth;
  static constexpr size_t hidden_bias = hidden + kHidden * kContext * kWidth;
  static constexpr size_t project = hidden_bias + kHidden;
  static constexpr size_t bias = project + kWidth * kHidden;
  static constexpr size_t kUntied = bias + kVocabulary;
  static constexpr size_t kMost = kUntied + kVocabulary * kWidth;
  size_t head, total;
};

uint16_t toBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
float fromBf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// To the nearest value of fp16, infinite beyond its range.
float throughFp16(float x) {
  const float a = std::fabs(x);
  if (!(a < 65520.0f)) return std::isnan(x) ? x : std::copysign(std::numeric_limits<float>::infinity(), x);
  int exponent;
  std::frexp(a, &exponent);
  const float step = std::ldexp(1.0f, std::max(exponent - 11, -24));
  return std::copysign(std::nearbyint(a / step) * step, x);
}

float throughE4m3(float x, bool toward_zero) {
  const float a = std::min(std::fabs(x), 448.0f);
  if (a == 0) return 0;
  int exponent;
  std::frexp(a, &exponent);
  const float step = std::ldexp(1.0f, std::max(exponent - 4, -9));
  const float q = a / step;
  return std::copysign((toward_zero ? std::floor(q) : std::nearbyint(q)) * step, x);
}

// What arrives of a buffer sent as e4m3 in blocks.
void throughWire(float* values, size_t count, bool toward_zero) {
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, count);
    float most = 0;
    for (size_t i = begin; i < end; ++i) most = std::max(most, std::fabs(values[i]));
    const float scale = std::max(most / 448.0f, 0x1p-126f);
    for (size_t i = begin; i < end; ++i) values[i] = throughE4m3(values[i] / scale, toward_zero) * scale;
  }
}

// torch's LambdaLR: the factor of step 0 is applied when it is made.
class LambdaRate {
 public:
  LambdaRate(const Config& c, int64_t last = -1) : config_(c), last_(last) { step(); }
  void step() {
    ++last_;
    rate_ = config_.rate * factor(static_cast<double>(last_));
  }
  double rate() const { return rate_; }
  int64_t last() const { return last_; }

 private:
  double factor(double step) const {
    const auto warmup = static_cast<double>(config_.warmup);
    switch (config_.schedule) {
      case Schedule::kWarmup:
        return std::min(1.0, (step + 1) / warmup);
      case Schedule::kWarmupFromZero:
        return std::min(1.0, step / warmup);
      case Schedule::kZeroThenOne:
        return step == 0 ? 0.0 : 1.0;
      case Schedule::kCosine: {
        if (step + 1 < warmup) return (step + 1) / warmup;
        const double done =
            std::min(1.0, (step + 1 - warmup) / (static_cast<double>(config_.steps) - warmup));
        return 0.55 + 0.45 * std::cos(done * 3.14159265358979);
      }
    }
    return 1;
  }
  const Config& config_;
  int64_t last_;
  double rate_ = 0;
};

// Positions of the text in the order of an epoch, dealt to ranks as torch's DistributedSampler does.
class Loader {
 public:
  Loader(uint64_t seed, uint64_t start) : seed_(seed), taken_(start) { shuffle(); }
  // The next `count` positions of each rank.
  void take(size_t count, std::array<std::vector<uint32_t>, kWorld>* batches) {
    for (auto& b : *batches) b.clear();
    for (size_t i = 0; i < count * kWorld; ++i) {
      if (taken_ / kPositions != epoch_) shuffle();
      (*batches)[i % kWorld].push_back(order_[taken_++ % kPositions]);
    }
  }
  uint64_t taken() const { return taken_; }

 private:
  void shuffle() {
    epoch_ = taken_ / kPositions;
    order_.resize(kPositions);
    std::iota(order_.begin(), order_.end(), 0);
    Random random(seed_ * 1000003 + epoch_);
    for (size_t i = kPositions - 1; i > 0; --i) std::swap(order_[i], order_[random.below(i + 1)]);
  }
  uint64_t seed_, taken_, epoch_ = 0;
  std::vector<uint32_t> order_;
};

// torch's GradScaler.
struct Scaler {
  double scale = 65536;
  int good = 0;
  void update(bool overflow, int interval) {
    if (overflow) {
      scale = std::max(scale / 2, 1.0);
      good = 0;
    } else if (++good >= interval) {
      scale *= 2;
      good = 0;
    }
  }
};

struct Replica {
  Replica()
      : params(Layout::kMost),
        grads(Layout::kMost),
        copies(Layout::kMost),
        m(Layout::kMost),
        v(Layout::kMost) {}
  std::vector<float> params, grads;
  std::vector<float> copies;  // what an optimizer that holds other tensors updates
  std::vector<float> m, v;    // in bf16: values that bf16 can hold
  Random dropout{0};
};

void initialise(Replica* r, const Layout& layout, uint64_t seed) {
  Random random(seed * 77 + 5);
  const auto fill = [&](size_t at, size_t count, float size) {
    for (size_t i = 0; i < count; ++i) r->params[at + i] = (2 * random.uniform() - 1) * size;
  };
  fill(Layout::embedding, kVocabulary * kWidth, 0.5f);
  fill(Layout::hidden, kHidden * kContext * kWidth, std::sqrt(3.0f / (kContext * kWidth)));
  fill(Layout::project, kWidth * kHidden, std::sqrt(3.0f / kHidden));
  if (layout.head != Layout::embedding) fill(layout.head, kVocabulary * kWidth, 0.5f);
}

// Mean loss of a batch; adds `factor` times the gradient to r->grads.
double backward(Replica* r, const Layout& layout, const Text& text, const std::vector<uint32_t>& batch,
                double dropout, float factor, bool broken, bool bad_samples) {
  const float* p = r->params.data();
  float* g = r->grads.data();
  double loss = 0;
  const float keep = 1.0f / static_cast<float>(1 - dropout);
  const float weight = factor / static_cast<float>(batch.size());
  for (const uint32_t at : batch) {
    std::array<float, kContext * kWidth> x, dx{};
    for (size_t c = 0; c < kContext; ++c) {
      const float* row = p + Layout::embedding + text.letters[at + c] * kWidth;
      std::copy(row, row + kWidth, x.begin() + c * kWidth);
    }
    std::array<float, kHidden> h, mask, dh{};
    for (size_t j = 0; j < kHidden; ++j) {
      const float* w = p + Layout::hidden + j * x.size();
      float sum = p[Layout::hidden_bias + j];
      for (size_t k = 0; k < x.size(); ++k) sum += w[k] * x[k];
      mask[j] = dropout == 0 ? 1.0f : r->dropout.uniform() < dropout ? 0.0f : keep;
      h[j] = std::max(sum, 0.0f);
      if (sum <= 0) mask[j] = 0;
      h[j] *= mask[j];
    }
    if (broken || (bad_samples && at % 300 == 7)) h[0] = std::numeric_limits<float>::quiet_NaN();
    std::array<float, kWidth> z, dz{};
    for (size_t d = 0; d < kWidth; ++d) {
      const float* w = p + Layout::project + d * kHidden;
      float sum = 0;
      for (size_t j = 0; j < kHidden; ++j) sum += w[j] * h[j];
      z[d] = sum;
    }
    std::array<float, kVocabulary> logit;
    float most = -std::numeric_limits<float>::infinity();
    for (size_t v = 0; v < kVocabulary; ++v) {
      const float* w = p + layout.head + v * kWidth;
      float sum = p[Layout::bias + v];
      for (size_t d = 0; d < kWidth; ++d) sum += w[d] * z[d];
      logit[v] = sum;
      most = std::max(most, sum);
    }
    float total = 0;
    for (float& l : logit) total += l = std::exp(l - most);
    const size_t target = text.letters[at + kContext];
    loss -= std::log(logit[target] / total);
    for (size_t v = 0; v < kVocabulary; ++v) {
      const float d = (logit[v] / total - (v == target ? 1.0f : 0.0f)) * weight;
      g[Layout::bias + v] += d;
      const float* w = p + layout.head + v * kWidth;
      float* gw = g + layout.head + v * kWidth;
      for (size_t k = 0; k < kWidth; ++k) {
        gw[k] += d * z[k];
        dz[k] += d * w[k];
      }
    }
    for (size_t d = 0; d < kWidth; ++d) {
      const float* w = p + Layout::project + d * kHidden;
      float* gw = g + Layout::project + d * kHidden;
      for (size_t j = 0; j < kHidden; ++j) {
        gw[j] += dz[d] * h[j];
        dh[j] += dz[d] * w[j];
      }
    }
    for (size_t j = 0; j < kHidden; ++j) {
      const float d = dh[j] * mask[j];
      const float* w = p + Layout::hidden + j * x.size();
      float* gw = g + Layout::hidden + j * x.size();
      g[Layout::hidden_bias + j] += d;
      for (size_t k = 0; k < x.size(); ++k) {
        gw[k] += d * x[k];
        dx[k] += d * w[k];
      }
    }
    for (size_t c = 0; c < kContext; ++c) {
      float* row = g + Layout::embedding + text.letters[at + c] * kWidth;
      for (size_t k = 0; k < kWidth; ++k) row[k] += dx[c * kWidth + k];
    }
  }
  return loss / static_cast<double>(batch.size());
}

float added(const std::array<float, kWorld>& x, Order order, size_t element) {
  switch (order) {
    case Order::kRank:
      return ((x[0] + x[1]) + x[2]) + x[3];
    case Order::kReversed:
      return ((x[3] + x[2]) + x[1]) + x[0];
    case Order::kTree:
      return (x[0] + x[1]) + (x[2] + x[3]);
    case Order::kRing: {
      const size_t first = element / 64 % kWorld;
      return ((x[first] + x[(first + 1) % kWorld]) + x[(first + 2) % kWorld]) + x[(first + 3) % kWorld];
    }
  }
  return 0;
}

void allReduce(const Config& c, const Layout& layout, std::vector<Replica>* ranks) {
  const Mistakes& bad = c.mistakes;
  const float divisor = bad.no_world_mean ? 1.0f : static_cast<float>(kWorld);
  const bool toward_zero = c.wire == Wire::kE4m3TowardZero;
  std::array<std::vector<float>, kWorld> sent;
  for (size_t r = 0; r < kWorld; ++r) {
    sent[r].assign((*ranks)[r].grads.begin(), (*ranks)[r].grads.begin() + layout.total);
    if (c.wire != Wire::kExact) throughWire(sent[r].data(), layout.total, toward_zero);
  }
  std::vector<float> sum(layout.total);
  for (size_t r = 0; r < kWorld; ++r) {
    if (r > 0 && !bad.order_by_rank) break;
    const Order order =
        bad.order_by_rank ? static_cast<Order>((static_cast<size_t>(c.order) + r) % 4) : c.order;
    for (size_t i = 0; i < layout.total; ++i) {
      sum[i] = added({sent[0][i], sent[1][i], sent[2][i], sent[3][i]}, order, i) / divisor;
    }
    if (bad.order_by_rank) std::copy(sum.begin(), sum.end(), (*ranks)[r].grads.begin());
  }
  if (bad.order_by_rank) return;
  std::vector<float> arrived = sum;
  if (c.wire != Wire::kExact) throughWire(arrived.data(), layout.total, toward_zero);
  const size_t shard = (layout.total / kWorld / kBlock + 1) * kBlock;
  for (size_t r = 0; r < kWorld; ++r) {
    std::copy(arrived.begin(), arrived.end(), (*ranks)[r].grads.begin());
    if (!bad.owner_keeps_exact) continue;
    const size_t begin = std::min(r * shard, layout.total), end = std::min(begin + shard, layout.total);
    std::copy(sum.begin() + begin, sum.begin() + end, (*ranks)[r].grads.begin() + begin);
  }
}

void clip(Replica* r, size_t count, double limit) {
  double square = 0;
  for (size_t i = 0; i < count; ++i) square += static_cast<double>(r->grads[i]) * r->grads[i];
  const double norm = std::sqrt(square);
  if (!(norm > limit)) return;
  const auto factor = static_cast<float>(limit / (norm + 1e-6));
  for (size_t i = 0; i < count; ++i) r->grads[i] *= factor;
}

void update(const Config& c, const Layout& layout, Replica* r, double rate, int64_t updates) {
  const auto store = [&](float* to, float x) {
    *to = c.mistakes.params_cut ? std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xFFFFE000u) : x;
  };
  std::vector<float>& p = c.mistakes.optimizer_holds_copies ? r->copies : r->params;
  const auto lr = static_cast<float>(rate);
  if (c.optimizer == Optimizer::kSgd) {
    for (size_t i = 0; i < layout.total; ++i) {
      r->m[i] = 0.9f * r->m[i] + r->grads[i];
      store(&p[i], p[i] - lr * r->m[i]);
    }
    return;
  }
  const float m_weight = 1 / (1 - std::pow(0.9f, static_cast<float>(updates)));
  const float v_weight = 1 / (1 - std::pow(0.999f, static_cast<float>(updates)));
  for (size_t i = 0; i < layout.total; ++i) {
    const float g = r->grads[i];
    r->m[i] = 0.9f * r->m[i] + 0.1f * g;
    r->v[i] = 0.999f * r->v[i] + 0.001f * g * g;
    if (c.mistakes.state_in_bf16) {
      r->m[i] = fromBf16(toBf16(r->m[i]));
      r->v[i] = fromBf16(toBf16(r->v[i]));
    }
    store(&p[i], p[i] - lr * (r->m[i] * m_weight) / (std::sqrt(r->v[i] * v_weight) + 1e-8f));
  }
}

struct Checkpoint {
  size_t step;
  uint64_t taken;
  int64_t schedule, updates;
  Scaler scaler;
  std::vector<Replica> ranks;
};

class Training {
 public:
  Training(const Config& config, const std::string& directory) : c_(config), directory_(directory) {
    if (c_.mistakes.rate_tiny) c_.rate *= 1e-4;
  }

  std::string run() {
    const size_t stop = c_.resume_at > 0 && c_.resume_at < c_.steps ? c_.resume_at : c_.steps;
    begin(nullptr);
    std::string problem = go(0, stop);
    if (!problem.empty() || stop == c_.steps) return problem;
    const Checkpoint saved{stop, loader_->taken(), schedule_->last(), updates_, scaler_, ranks_};
    recorders_.clear();
    begin(&saved);
    return go(stop, c_.steps);
  }

 private:
  void begin(const Checkpoint* saved) {
    const Mistakes& bad = c_.mistakes;
    const bool broken = bad.tie_broken_by_wrap || (saved != nullptr && bad.tie_broken_by_load);
    layout_ = Layout(c_.tied && !broken);
    ranks_ = std::vector<Replica>(kWorld);
    uint64_t shared = c_.seed;
    if (bad.shuffle_from_shared) shared = Random(c_.seed + 0xABCDEF).next();  // another draw came before
    for (size_t r = 0; r < kWorld; ++r) {
      initialise(&ranks_[r], Layout(c_.tied), bad.init_by_rank ? c_.seed + 1000 * r : c_.seed);
      ranks_[r].dropout = Random(c_.seed * 131 + (bad.dropout_seed_shared ? 0 : r + 1));
    }
    loader_ = std::make_unique<Loader>(shared, 0);
    schedule_ = std::make_unique<LambdaRate>(c_);
    scaler_ = Scaler{c_.first_scale};
    updates_ = 0;
    if (saved != nullptr) {
      for (size_t r = 0; r < kWorld; ++r) {
        ranks_[r] = saved->ranks[r];
        // Tied weights are in a checkpoint twice.
        if (!c_.tied || layout_.head == Layout::embedding) continue;
        std::copy_n(ranks_[r].params.begin() + Layout::embedding, kVocabulary * kWidth,
                    ranks_[r].params.begin() + layout_.head);
      }
      const uint64_t seed = bad.loader_seeded_anew ? c_.seed + 99 : c_.seed;
      loader_ = std::make_unique<Loader>(
          seed, bad.loader_restarts ? saved->taken / kPositions * kPositions : saved->taken);
      schedule_ = std::make_unique<LambdaRate>(c_, saved->schedule - 1);
      scaler_ = saved->scaler;
      updates_ = saved->updates;
    } else if (c_.tied && layout_.head != Layout::embedding) {
      for (Replica& r : ranks_) {
        std::copy_n(r.params.begin() + Layout::embedding, kVocabulary * kWidth,
                    r.params.begin() + layout_.head);
      }
    }
    for (Replica& r : ranks_) r.copies = r.params;
  }

  std::string open(size_t from) {
    for (size_t r = 0; r < kWorld; ++r) {
      Replica& replica = ranks_[r];
      parity::Header h;
      h.rank = static_cast<int64_t>(r);
      h.world_size = kWorld;
      h.seed = static_cast<int64_t>(c_.seed);
      h.accumulation = static_cast<int64_t>(c_.accumulation);
      h.sharded = false;
      h.dropout = c_.dropout;
      h.tied = layout_.head == Layout::embedding ? 1 : 0;
      h.tied_expected = c_.tied;
      h.program = "parity_zoo";
      if (from > 0) h.resumed_from = static_cast<int64_t>(from);
      std::vector<parity::Tensor> tensors;
      const auto add = [&](const char* name, size_t at, size_t count, uint32_t group) {
        tensors.push_back({name, replica.params.data() + at, count, parity::Type::kFp32,
                           replica.grads.data() + at, parity::Type::kFp32, group});
      };
      add("embedding", Layout::embedding, kVocabulary * kWidth, 0);
      add("hidden.weight", Layout::hidden, kHidden * kContext * kWidth, 0);
      add("hidden.bias", Layout::hidden_bias, kHidden, 1);
      add("project.weight", Layout::project, kWidth * kHidden, 0);
      add("out.bias", Layout::bias, kVocabulary, 1);
      if (layout_.head != Layout::embedding) add("head.weight", layout_.head, kVocabulary * kWidth, 0);
      std::string error;
      recorders_.push_back(parity::Recorder::open(directory_, h, std::move(tensors), &error));
      if (!error.empty()) return error;
    }
    return "";
  }

  // A state dictionary is loaded while training, and each of its two copies gets memory of its own.
  void loadBothCopies() {
    layout_ = Layout(false);
    for (Replica& r : ranks_) {
      std::copy_n(r.params.begin() + Layout::embedding, kVocabulary * kWidth,
                  r.params.begin() + layout_.head);
    }
  }

  int64_t tiedApart(const Replica& r) const {
    if (layout_.head == Layout::embedding) return 0;
    const auto begin = r.params.begin() + Layout::embedding;
    return std::equal(begin, begin + kVocabulary * kWidth, r.params.begin() + layout_.head) ? 0 : 1;
  }

  std::string go(size_t from, size_t to) {
    if (std::string problem = open(from); !problem.empty()) return problem;
    const Mistakes& bad = c_.mistakes;
    std::array<std::vector<uint32_t>, kWorld> batches;
    const size_t micro = std::max<size_t>(c_.samples / c_.accumulation, 1);
    tied_at_start_ = layout_.head == Layout::embedding;
    for (size_t step = from; step < to; ++step) {
      if (bad.tie_broken_live && step == c_.steps / 2 && layout_.head == Layout::embedding) loadBothCopies();
      const float scale = c_.scaler ? static_cast<float>(scaler_.scale) : 1.0f;
      const float share = bad.no_accumulation_mean ? 1.0f : 1.0f / static_cast<float>(c_.accumulation);
      for (size_t r = 0; r < kWorld; ++r) {
        std::fill(ranks_[r].grads.begin(), ranks_[r].grads.end(), 0.0f);
        recorders_[r]->randomState(&ranks_[r].dropout.state, sizeof ranks_[r].dropout.state);
      }
      std::array<std::vector<float>, kWorld> reduced;
      for (size_t m = 0; m < c_.accumulation; ++m) {
        loader_->take(micro, &batches);
        const bool last = m + 1 == c_.accumulation;
        if (last && bad.last_micro_batch_local && c_.accumulation > 1) {
          allReduce(c_, layout_, &ranks_);  // of what is there so far; the rest stays with its rank
          for (size_t r = 0; r < kWorld; ++r) reduced[r] = ranks_[r].grads;
        }
        for (size_t r = 0; r < kWorld; ++r) {
          recorders_[r]->batch(batches[r].data(), batches[r].size() * sizeof(uint32_t), micro * kWorld);
          const bool broken = bad.model_breaks && r == 1 && step >= c_.steps / 2;
          const double loss = backward(&ranks_[r], layout_, text_, batches[r], c_.dropout, scale * share,
                                       broken, bad.bad_samples);
          recorders_[r]->loss(loss);
        }
        if (bad.scheduler_every_micro_batch && !last) schedule_->step();
      }
      bool overflow = false;
      if (c_.scaler) {
        for (Replica& r : ranks_) {
          for (size_t i = 0; i < layout_.total; ++i) r.grads[i] = throughFp16(r.grads[i]);
        }
      }
      const bool reduce = !bad.no_reduction && !(bad.last_micro_batch_local && c_.accumulation > 1);
      if (reduce) allReduce(c_, layout_, &ranks_);
      if (c_.scaler && bad.clip_before_unscale && c_.clip > 0) {
        for (size_t r = 0; r < kWorld; ++r) {
          recorders_[r]->gradients();
          clip(&ranks_[r], layout_.total, c_.clip);
        }
      }
      if (c_.scaler) {
        for (Replica& r : ranks_) {
          for (size_t i = 0; i < layout_.total; ++i) {
            overflow = overflow || !std::isfinite(r.grads[i]);
            r.grads[i] /= scale;
          }
        }
      }
      if (bad.scheduler_before_optimizer) schedule_->step();
      const double rate = schedule_->rate();
      if (!overflow) ++updates_;
      for (size_t r = 0; r < kWorld; ++r) {
        parity::Recorder& recorder = *recorders_[r];
        Replica& replica = ranks_[r];
        if (c_.scaler) recorder.lossScale(scale);
        if (tied_at_start_) recorder.tiedApart(tiedApart(replica));
        if (c_.scaler && overflow) {
          recorder.skipped({rate, rate});
          continue;
        }
        if (!(c_.scaler && bad.clip_before_unscale)) recorder.gradients();
        if (c_.clip > 0 && !bad.clip_before_unscale) clip(&replica, layout_.total, c_.clip);
        recorder.beforeUpdate({rate, rate});
        update(c_, layout_, &replica, rate, updates_);
        recorder.afterUpdate(bad.state_in_bf16 ? "bfloat16" : "float32");
      }
      if (c_.scaler && !bad.scaler_not_updated) scaler_.update(overflow, bad.scaler_grows_fast ? 2 : 2000);
      if (!bad.scheduler_before_optimizer) schedule_->step();
      for (const auto& recorder : recorders_) {
        if (!recorder->error().empty()) return recorder->error();
      }
    }
    return "";
  }

  Config c_;
  std::string directory_;
  Text text_;
  Layout layout_{true};
  bool tied_at_start_ = true;
  std::vector<Replica> ranks_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<LambdaRate> schedule_;
  Scaler scaler_;
  int64_t updates_ = 0;
  std::vector<std::unique_ptr<parity::Recorder>> recorders_;
};

}  // namespace

std::string train(const Config& config, const std::string& directory) {
  const size_t micro = config.accumulation > 0 ? config.samples / config.accumulation : 0;
  if (micro == 0 || config.steps == 0)
    return "a run needs at least one step, and a sample in every micro-batch";
  return Training(config, directory).run();
}

}  // namespace halfwire::zoo
