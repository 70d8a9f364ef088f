// Made-up training runs for tests and for the measurement of error rates: a falling loss with correlated
// noise, an offset of each run, a warm-up and decay, gradients that shrink, replicas that agree.
#pragma once

#include <cmath>
#include <random>

#include "parity/record.h"

namespace halfwire::parity {

struct Synthetic {
  uint64_t seed = 1;
  size_t ranks = 2;
  uint32_t steps = 400;
  double floor = 2;          // of the loss
  double drop = 2.5;         // that it falls
  double run_noise = 0.004;  // standard deviation between runs
  double noise = 0.05;       // of one step
  double correlation = 0.3;  // of neighbouring steps
  double gap = 0;            // added to the loss at all steps
  double warmup = 20;
  double clip = 1;
};

inline Run makeRun(const Synthetic& s) {
  std::mt19937_64 random(s.seed * 7919 + 17);
  std::normal_distribution<double> normal;
  const double offset = s.gap + s.run_noise * normal(random);
  const auto hash = [&] { return random() | 1; };
  Run run;
  run.path = "run";
  run.ranks.resize(s.ranks);
  for (size_t r = 0; r < s.ranks; ++r) {
    Header& h = run.ranks[r].header;
    h.rank = static_cast<int64_t>(r);
    h.world_size = static_cast<int64_t>(s.ranks);
    h.seed = static_cast<int64_t>(s.seed);
    h.accumulation = 1;
    h.elements = h.sampled_elements = 4096;
    h.sharded = false;
    h.dropout = 0.1;
    h.tied = 0;
    h.precision = "fp32";
    run.ranks[r].groups.resize(1);
  }
  double noise = normal(random);
  for (uint32_t t = 0; t < s.steps; ++t) {
    noise = s.correlation * noise + std::sqrt(1 - s.correlation * s.correlation) * normal(random);
    const double lr = 1e-3 * std::min(1.0, (t + 1) / s.warmup) * (1 - 0.9 * t / s.steps);
    const double norm =
        (0.6 + std::exp(-static_cast<double>(t) / (0.1 * s.steps))) * std::exp(0.2 * normal(random));
    const uint64_t gradient = hash(), parameters = hash();
    for (RankRecord& rank : run.ranks) {
      const size_t row = rank.rows();
      rank.step.push_back(t);
      rank.loss.set(row,
                    s.floor + offset + s.drop * std::exp(-static_cast<double>(t) / (0.15 * s.steps)) +
                        s.noise * (noise + normal(random)),
                    s.steps);
      rank.samples.set(row, 64 * (int64_t{t} + 1), s.steps);
      rank.batch_hash.set(row, hash(), s.steps);
      rank.rng_hash.set(row, hash(), s.steps);
      Group& g = rank.groups[0];
      g.lr.set(row, lr, s.steps);
      g.grad_norm.set(row, static_cast<float>(norm), s.steps);
      g.grad_norm_clipped.set(row, static_cast<float>(std::min(norm, s.clip)), s.steps);
      g.grad_hash.set(row, gradient, s.steps);
      g.update_norm.set(row, static_cast<float>(lr * 60), s.steps);
      g.unchanged.set(row, 0.01F, s.steps);
      g.param_norm.set(row, static_cast<float>(12 + 0.001 * t), s.steps);
      g.param_sum.set(row, -3 + 1e-3 * t, s.steps);
      g.param_hash.set(row, parameters, s.steps);
      g.nonfinite.set(row, 0, s.steps);
      g.state_dtype.set(row, static_cast<uint8_t>(StateType::kFloat32), s.steps);
    }
  }
  return run;
}

}  // namespace halfwire::parity
