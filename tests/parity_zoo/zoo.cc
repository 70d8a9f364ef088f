#include "zoo.h"

#include <cmath>

namespace halfwire::zoo {
namespace {

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567) {}
  uint64_t below(uint64_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return (state_ >> 11) % n;
  }
  double between(double low, double high) {
    return low + (high - low) * static_cast<double>(below(1 << 20)) / (1 << 20);
  }

 private:
  uint64_t state_;
};

// Plain: what a mistake does not need is left out, so that the mistake alone is seen.
void fresh(Config* b, Config* c) { b->resume_at = c->resume_at = 0; }
void resumed(Config* b, Config* c) {
  c->resume_at = 120;
  b->resume_at = 0;
}
void scaled(Config* b, Config* c) {
  for (Config* x : {b, c}) {
    x->scaler = true;
    x->first_scale = 65536;
    x->wire = Wire::kExact;
  }
}
void both(Config* b, Config* c, const std::function<void(Config*)>& change) {
  change(b);
  change(c);
}

std::vector<Case> build() {
  using Q = Question;
  std::vector<Case> all;
  const auto add = [&](const char* name, const char* variant, Q question,
                       std::function<void(Config*, Config*)> make) -> Case& {
    return all.emplace_back(Case{name, variant, question, std::move(make)});
  };
  add("step0-no-op", "schedule(0) = 0, then 1", Q::kAlone, [](Config* b, Config* c) {
    fresh(b, c);
    c->first_scale = 65536;  // an overflow at step 0 would have lost that update anyway
    c->schedule = Schedule::kZeroThenOne;
  });
  add("step0-no-op", "warm-up from 0: a warning", Q::kAlone, [](Config* b, Config* c) {
    fresh(b, c);
    c->first_scale = 65536;
    c->schedule = Schedule::kWarmupFromZero;
  }).only_warning = true;
  add("schedule-shifted", "scheduler before optimizer", Q::kOneByOne,
      [](Config*, Config* c) { c->mistakes.scheduler_before_optimizer = true; });
  add("schedule-shifted", "warm-up from 0 beside one from 1", Q::kOneByOne, [](Config* b, Config* c) {
    fresh(b, c);
    b->schedule = Schedule::kWarmup;
    c->schedule = Schedule::kWarmupFromZero;
  });
  add("schedule-stretched", "scheduler in every micro-batch", Q::kOneByOne, [](Config* b, Config* c) {
    both(b, c, [](Config* x) {
      x->accumulation = 2 + 2 * (x->seed % 2),
      x->schedule = x->seed % 3 ? Schedule::kCosine : Schedule::kWarmup;
    });
    c->mistakes.scheduler_every_micro_batch = true;
  });
  add("gradients-scaled", "not divided by the ranks", Q::kOneByOne,
      [](Config*, Config* c) { c->mistakes.no_world_mean = true; });
  add("gradients-scaled", "not divided by the micro-batches", Q::kOneByOne, [](Config* b, Config* c) {
    both(b, c, [](Config* x) { x->accumulation = 2; });
    c->mistakes.no_accumulation_mean = true;
  });
  add("gradients-not-reduced", "reduction left out", Q::kAlone,
      [](Config*, Config* c) { c->mistakes.no_reduction = true; });
  add("gradients-not-reduced", "last micro-batch stays local", Q::kAlone, [](Config*, Config* c) {
    c->accumulation = 2;
    c->mistakes.last_micro_batch_local = true;
  });
  add("replicas-apart", "initialised by rank", Q::kAlone,
      [](Config*, Config* c) { c->mistakes.init_by_rank = true; });
  add("replicas-apart", "owner of a shard keeps its exact sum", Q::kAlone, [](Config*, Config* c) {
    c->wire = Wire::kE4m3;
    c->mistakes.owner_keeps_exact = true;
  });
  add("replicas-apart", "another order of adding on every rank", Q::kAlone, [](Config*, Config* c) {
    c->wire = Wire::kExact;
    c->mistakes.order_by_rank = true;
  });
  add("update-zero", "optimizer holds copies", Q::kAlone,
      [](Config*, Config* c) { c->mistakes.optimizer_holds_copies = true; });
  add("state-low-precision", "Adam's moments in bf16", Q::kOneByOne, [](Config* b, Config* c) {
    both(b, c, [](Config* x) { x->optimizer = Optimizer::kAdam, x->rate = 0.005; });
    c->mistakes.state_in_bf16 = true;
  });
  add("clipping-changed", "half the norm", Q::kOneByOne, [](Config* b, Config* c) {
    b->clip = 0.5;
    c->clip = 0.25;
  });
  add("clipping-changed", "none", Q::kOneByOne, [](Config* b, Config* c) {
    b->clip = 0.5;
    c->clip = 0;
  });
  add("clipping-changed", "before unscaling", Q::kOneByOne, [](Config* b, Config* c) {
    scaled(b, c);
    b->clip = c->clip = 0.5;
    c->mistakes.clip_before_unscale = true;
  });
  add("data-order-differs", "shuffled from a shared generator", Q::kOneByOne,
      [](Config*, Config* c) { c->mistakes.shuffle_from_shared = true; });
  add("data-order-differs", "another seed after a resume", Q::kOneByOne, [](Config* b, Config* c) {
    resumed(b, c);
    c->mistakes.loader_seeded_anew = true;
  });
  add("data-repeats", "epoch begun again after a resume", Q::kAlone, [](Config* b, Config* c) {
    resumed(b, c);
    c->mistakes.loader_restarts = true;
  });
  add("data-repeats", "the same, beside a baseline", Q::kOneByOne, [](Config* b, Config* c) {
    resumed(b, c);
    c->mistakes.loader_restarts = true;
  });
  add("dropout-identical", "seed without the rank", Q::kAlone, [](Config*, Config* c) {
    c->dropout = 0.1;
    c->mistakes.dropout_seed_shared = true;
  });
  add("dropout-identical", "the same, beside a baseline", Q::kOneByOne, [](Config* b, Config* c) {
    b->dropout = c->dropout = 0.1;
    c->mistakes.dropout_seed_shared = true;
  });
  add("loss-scale-stuck", "scaler.update() missing", Q::kAlone, [](Config* b, Config* c) {
    scaled(b, c);
    fresh(b, c);
    c->first_scale = 0x1p26;
    c->mistakes.scaler_not_updated = true;
  });
  add("loss-scale-stuck", "NaN from half-way on", Q::kAlone, [](Config* b, Config* c) {
    scaled(b, c);
    c->mistakes.model_breaks = true;
  });
  add("steps-skipped", "scale doubles after two steps", Q::kAlone, [](Config* b, Config* c) {
    scaled(b, c);
    c->mistakes.scaler_grows_fast = true;
  });
  add("steps-skipped", "one sample in 300 is NaN", Q::kAlone, [](Config* b, Config* c) {
    scaled(b, c);
    c->mistakes.bad_samples = true;
  });
  add("bias-grows", "e4m3 rounded toward zero, SGD", Q::kThree, [](Config* b, Config* c) {
    both(b, c, [](Config* x) {
      x->optimizer = Optimizer::kSgd, x->rate = 0.01, x->clip = 0, x->schedule = Schedule::kWarmup;
    });
    b->wire = Wire::kExact;
    c->wire = Wire::kE4m3TowardZero;
  }).uncertain = true;
  // Near the end of learning the shorter steps cost a constant half per cent, which does not grow.
  add("bias-grows", "the same at a rate that converges", Q::kThree, [](Config* b, Config* c) {
    both(b, c,
         [](Config* x) { x->optimizer = Optimizer::kSgd, x->rate = 0.08, x->clip = 0, x->scaler = false; });
    b->wire = Wire::kExact;
    c->wire = Wire::kE4m3TowardZero;
  }).uncertain = true;
  add("bias-grows", "parameters cut to ten bits, low rate", Q::kThree, [](Config* b, Config* c) {
    both(b, c, [](Config* x) {
      x->optimizer = Optimizer::kAdam, x->rate = x->rate < 0.006 ? 0.0005 : 0.001;
      x->schedule = Schedule::kWarmup;
    });
    c->mistakes.params_cut = true;
  });
  add("tying-lost", "two tensors after a resume", Q::kAlone, [](Config* b, Config* c) {
    resumed(b, c);
    c->tied = true;
    c->mistakes.tie_broken_by_load = true;
  });
  add("tying-lost", "two tensors after a load half-way", Q::kAlone, [](Config* b, Config* c) {
    fresh(b, c);
    c->tied = true;
    c->mistakes.tie_broken_live = true;
  });
  add("tying-lost", "model copied tensor by tensor", Q::kAlone, [](Config* b, Config* c) {
    fresh(b, c);
    c->tied = true;
    c->mistakes.tie_broken_by_wrap = true;
  });
  Case& alone = add("never-trained", "rate 10^4 times too small, alone", Q::kAlone, [](Config* b, Config* c) {
    fresh(b, c);
    c->mistakes.rate_tiny = true;
  });
  alone.refused = true;
  Case& compared = add("never-trained", "the same on both sides", Q::kThree, [](Config* b, Config* c) {
    fresh(b, c);
    b->mistakes.rate_tiny = c->mistakes.rate_tiny = true;
  });
  compared.refused = true;
  return all;
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = build();
  return all;
}

Config faultFree(uint64_t seed) {
  Draw draw(seed);
  for (int i = 0; i < 8; ++i) draw.below(2);
  Config c;
  c.seed = seed;
  c.optimizer = draw.below(3) == 0 ? Optimizer::kSgd : Optimizer::kAdam;
  c.rate = c.optimizer == Optimizer::kSgd ? draw.between(0.03, 0.1) : draw.between(0.003, 0.01);
  c.warmup = 10 + draw.below(31);
  c.schedule = draw.below(2) == 0 ? Schedule::kWarmup : Schedule::kCosine;
  const double clips[] = {0, 0, 0.5, 1};
  c.clip = clips[draw.below(4)];
  c.dropout = draw.below(3) == 0 ? 0.1 : 0;
  c.tied = draw.below(2) == 0;
  c.scaler = draw.below(3) == 0;
  // From so high a scale some steps at the start overflow, as they do with torch's defaults.
  c.first_scale = draw.below(2) == 0 ? 65536 : 0x1p22;
  c.accumulation = 1 + draw.below(2);
  c.order = static_cast<Order>(draw.below(4));
  c.wire = draw.below(4) == 0 ? Wire::kE4m3 : Wire::kExact;
  c.resume_at = draw.below(3) == 0 ? 60 + draw.below(180) : 0;
  return c;
}

Config reordered(Config c, uint64_t seed) {
  c.order = static_cast<Order>((static_cast<uint64_t>(c.order) + 1 + seed % 3) % 4);
  return c;
}

double upperLimit(size_t k, size_t n) {
  if (n == 0 || k >= n) return 1;
  // The rate at which k or fewer of n come with a probability of 5 %.
  const auto atMost = [&](double p) {
    double sum = 0;
    for (size_t i = 0; i <= k; ++i) {
      const auto x = static_cast<double>(i), y = static_cast<double>(n);
      sum += std::exp(std::lgamma(y + 1) - std::lgamma(x + 1) - std::lgamma(y - x + 1) + x * std::log(p) +
                      (y - x) * std::log1p(-p));
    }
    return sum;
  };
  double low = 0, high = 1;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (atMost(middle) > 0.05 ? low : high) = middle;
  }
  return high;
}

}  // namespace halfwire::zoo
