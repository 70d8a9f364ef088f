// Each finding: seen where it should be, and not in what a sound program shows.
#include "parity/findings/findings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "parity/compare.h"
#include "parity/synthetic_run.h"

namespace halfwire::parity {
namespace {

using Recorded = ::halfwire::parity::Run;  // testing::Test has a member of that name
using Change = std::function<void(RankRecord&, size_t row)>;

Recorded changed(Recorded run, const Change& change) {
  for (RankRecord& rank : run.ranks) {
    for (size_t row = 0; row < rank.rows(); ++row) change(rank, row);
  }
  return run;
}
Recorded sound(uint64_t seed = 1) {
  Synthetic s;
  s.seed = seed;
  return makeRun(s);
}
const Finding* find(const Findings& all, const std::string& name) {
  for (const Finding& f : all) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

Findings alone(const Recorded& run) { return findAlone({&run, "run", lossSeries(run)}); }
Findings compared(const Recorded& a, const Recorded& b) {
  return findCompared({&a, "baseline", lossSeries(a)}, {&b, "candidate", lossSeries(b)});
}
#define EXPECT_FOUND(findings, name, as)                     \
  do {                                                       \
    const Findings found_ = (findings);                      \
    const Finding* f_ = find(found_, name);                  \
    ASSERT_NE(f_, nullptr) << name;                          \
    EXPECT_EQ(severityName(f_->severity), severityName(as)); \
  } while (false)
#define EXPECT_ABSENT(findings, name)                                                       \
  do {                                                                                      \
    const Findings found_ = (findings);                                                     \
    EXPECT_EQ(find(found_, name), nullptr) << name << ": " << find(found_, name)->evidence; \
  } while (false)

TEST(Findings, NothingInSoundRuns) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (const Finding& f : alone(sound(seed))) ADD_FAILURE() << f.name << ": " << f.evidence;
    for (const Finding& f : compared(sound(seed), sound(seed + 100)))
      ADD_FAILURE() << f.name << ": " << f.evidence;
  }
}

// A schedule whose factor at step 0 is 0.
Recorded noFirstUpdate(bool warmup) {
  return changed(sound(), [&](RankRecord& r, size_t row) {
    Group& g = r.groups[0];
    const double lr = warmup ? 1e-3 * std::min(1.0, static_cast<double>(row) / 20) : row == 0 ? 0 : 1e-3;
    g.lr.set(row, lr, 0);
    g.update_norm.set(row, static_cast<float>(lr * 60), 0);
  });
}

TEST(Findings, Step0NoOp) {
  EXPECT_FOUND(alone(noFirstUpdate(false)), "step0-no-op", Severity::kHard);
  const Findings f = alone(noFirstUpdate(true));
  EXPECT_FOUND(f, "step0-no-op", Severity::kWarning);
  EXPECT_THAT(find(f, "step0-no-op")->evidence, ::testing::HasSubstr("1 of 400 updates lost"));
  EXPECT_EQ(find(f, "step0-no-op")->step, 0);
  // A resumed run has no first update, and a run whose header names a warm-up meant it.
  Recorded resumed = noFirstUpdate(false);
  for (RankRecord& r : resumed.ranks) r.header.resumed_from = 100;
  EXPECT_ABSENT(alone(resumed), "step0-no-op");
  Recorded told = noFirstUpdate(false);
  for (RankRecord& r : told.ranks) r.header.warmup = 2;
  EXPECT_FOUND(alone(told), "step0-no-op", Severity::kWarning);
  // Logs of other tools hold rates of another step.
  Recorded log = noFirstUpdate(false);
  log.source = Source::kTrainerState;
  EXPECT_ABSENT(alone(log), "step0-no-op");
}

TEST(Findings, UpdateZero) {
  EXPECT_FOUND(
      alone(changed(sound(), [](RankRecord& r, size_t row) { r.groups[0].update_norm.set(row, 0, 0); })),
      "update-zero", Severity::kHard);
  // Rates that end at 0, elements without a gradient, a sample that holds nothing of the group.
  EXPECT_ABSENT(alone(changed(sound(),
                              [](RankRecord& r, size_t row) {
                                if (row < 380) return;
                                r.groups[0].lr.set(row, 1e-12, 0);
                                r.groups[0].update_norm.set(row, 0, 0);
                              })),
                "update-zero");
  EXPECT_ABSENT(alone(changed(sound(),
                              [](RankRecord& r, size_t row) {
                                r.groups[0].update_norm.set(row, 0, 0);
                                r.groups[0].unchanged.set(row, 0, 0);
                              })),
                "update-zero");
  EXPECT_ABSENT(alone(changed(sound(),
                              [](RankRecord& r, size_t row) {
                                r.groups[0].update_norm.set(row, 0, 0);
                                r.groups[0].param_norm.set(row, 0, 0);
                              })),
                "update-zero");
}

TEST(Findings, LowPrecision) {
  const auto run = [](StateType state, float unchanged, const char* precision) {
    Recorded r = changed(sound(), [&](RankRecord& k, size_t row) {
      k.groups[0].state_dtype.set(row, static_cast<uint8_t>(state), 0);
      k.groups[0].unchanged.set(row, unchanged, 0);
    });
    for (RankRecord& k : r.ranks) k.header.precision = precision;
    return r;
  };
  EXPECT_FOUND(alone(run(StateType::kBfloat16, 0.8F, "bf16")), "state-low-precision", Severity::kHard);
  EXPECT_FOUND(alone(run(StateType::kBfloat16, 0.1F, "bf16")), "state-low-precision", Severity::kNote);
  EXPECT_FOUND(alone(run(StateType::kInt8, 0.1F, "fp32")), "state-low-precision", Severity::kNote);
  EXPECT_FOUND(alone(run(StateType::kFloat32, 0.8F, "bf16")), "updates-vanish", Severity::kWarning);
  EXPECT_ABSENT(alone(run(StateType::kFloat32, 0.8F, "mixed")), "updates-vanish");
  EXPECT_FOUND(compared(sound(), run(StateType::kBfloat16, 0.1F, "fp32")), "state-low-precision",
               Severity::kWarning);
}

TEST(Findings, GradientsNotReduced) {
  const auto apart = [](float by) {
    return changed(sound(), [by](RankRecord& r, size_t row) {
      if (r.header.rank == 0) return;
      r.groups[0].grad_norm.set(row, r.groups[0].grad_norm[row] * (1 + by), 0);
      r.groups[0].grad_hash.set(row, r.groups[0].grad_hash[row] + 2, 0);
    });
  };
  EXPECT_FOUND(alone(apart(0.2F)), "gradients-not-reduced", Severity::kHard);
  // The order of a reduction.
  EXPECT_FOUND(alone(apart(1e-5F)), "gradients-not-reduced", Severity::kWarning);
  Recorded sharded = apart(0.2F);
  for (RankRecord& r : sharded.ranks) r.header.sharded = true;
  EXPECT_ABSENT(alone(sharded), "gradients-not-reduced");
  Recorded pipeline = apart(0.2F);
  pipeline.ranks[1].header.elements = 5000;
  EXPECT_ABSENT(alone(pipeline), "gradients-not-reduced");
  Recorded unknown = apart(0.2F);
  for (RankRecord& r : unknown.ranks) r.header.sharded.reset();
  EXPECT_ABSENT(alone(unknown), "gradients-not-reduced");
}

TEST(Findings, ReplicasApart) {
  const auto apart = [](double by, size_t from, size_t to) {
    return changed(sound(), [=](RankRecord& r, size_t row) {
      if (r.header.rank == 0 || row < from || row >= to) return;
      r.groups[0].param_hash.set(row, r.groups[0].param_hash[row] + 2, 0);
      r.groups[0].param_sum.set(row, r.groups[0].param_sum[row] + by, 0);
    });
  };
  const Findings f = alone(apart(0.1, 50, 400));
  EXPECT_FOUND(f, "replicas-apart", Severity::kHard);
  EXPECT_EQ(find(f, "replicas-apart")->step, 50);
  EXPECT_EQ(find(f, "replicas-apart")->rank, 1);
  EXPECT_FOUND(alone(apart(0, 50, 400)), "replicas-apart", Severity::kWarning);
  EXPECT_FOUND(alone(apart(0.1, 50, 60)), "replicas-apart", Severity::kWarning);
  Recorded local = apart(0.1, 50, 400);
  for (RankRecord& r : local.ranks) r.header.reduced = false;
  EXPECT_ABSENT(alone(local), "replicas-apart");
}

TEST(Findings, DropoutIdentical) {
  const auto same = [](double dropout, bool batches) {
    Recorded run = changed(sound(), [&](RankRecord& r, size_t row) {
      r.rng_hash.set(row, 1000 + row, 0);
      if (batches) r.batch_hash.set(row, 5000 + row, 0);
    });
    for (RankRecord& r : run.ranks) r.header.dropout = dropout;
    return run;
  };
  EXPECT_FOUND(alone(same(0.1, false)), "dropout-identical", Severity::kWarning);
  EXPECT_ABSENT(alone(same(0, false)), "dropout-identical");
  EXPECT_ABSENT(alone(same(0.1, true)), "dropout-identical");  // tensor parallel
  EXPECT_FOUND(compared(sound(), same(0.1, false)), "dropout-identical", Severity::kHard);
  EXPECT_ABSENT(compared(same(0.1, false), same(0.1, false)), "dropout-identical");
  EXPECT_FOUND(alone(same(0, true)), "data-same-on-ranks", Severity::kWarning);
}

TEST(Findings, LossScale) {
  const auto scaler = [](std::function<std::pair<float, bool>(size_t)> at) {
    return changed(sound(), [=](RankRecord& r, size_t row) {
      const auto [scale, skipped] = at(row);
      r.loss_scale.set(row, scale, 0);
      r.skipped.set(row, skipped ? 1 : 0, 0);
    });
  };
  EXPECT_FOUND(alone(scaler([](size_t t) { return std::pair(65536.F, t >= 200); })), "loss-scale-stuck",
               Severity::kHard);
  EXPECT_FOUND(alone(scaler([](size_t t) { return std::pair(t < 100 ? 8.F : 1.F, t >= 100 && t % 3 == 0); })),
               "loss-scale-stuck", Severity::kHard);
  // A scaler that finds its scale, and a fixed scale.
  const Recorded finds = scaler(
      [](size_t t) { return std::pair(t < 12 ? std::ldexp(65536.F, -static_cast<int>(t)) : 16.F, t < 12); });
  EXPECT_ABSENT(alone(finds), "loss-scale-stuck");
  EXPECT_ABSENT(alone(finds), "steps-skipped");
  EXPECT_ABSENT(alone(scaler([](size_t) { return std::pair(1.F, false); })), "loss-scale-stuck");
  EXPECT_FOUND(alone(scaler([](size_t t) { return std::pair(65536.F / (1.F + t), t % 3 == 0); })),
               "steps-skipped", Severity::kHard);
  EXPECT_FOUND(alone(scaler([](size_t t) { return std::pair(65536.F / (1.F + t), t % 20 == 19); })),
               "steps-skipped", Severity::kWarning);
  EXPECT_ABSENT(alone(scaler([](size_t t) { return std::pair(65536.F, t == 200); })), "steps-skipped");
}

TEST(Findings, LossNotFinite) {
  const auto from = [](size_t first, size_t end) {
    return changed(sound(), [=](RankRecord& r, size_t row) {
      if (row >= first && row < end) r.loss.set(row, std::numeric_limits<double>::infinity(), 0);
    });
  };
  EXPECT_FOUND(alone(from(200, 400)), "loss-not-finite", Severity::kHard);
  EXPECT_FOUND(alone(from(200, 202)), "loss-not-finite", Severity::kWarning);
}

TEST(Findings, Tying) {
  const auto tied = [](int64_t pairs, bool expected, uint32_t apart) {
    Recorded run =
        changed(sound(), [=](RankRecord& r, size_t row) { r.tied_apart.set(row, row >= 10 ? apart : 0, 0); });
    for (RankRecord& r : run.ranks) r.header.tied = pairs, r.header.tied_expected = expected;
    return run;
  };
  EXPECT_FOUND(alone(tied(1, true, 1)), "tying-lost", Severity::kHard);
  EXPECT_FOUND(alone(tied(0, true, 0)), "tying-lost", Severity::kHard);
  EXPECT_ABSENT(alone(tied(1, true, 0)), "tying-lost");
  EXPECT_ABSENT(alone(tied(0, false, 0)), "tying-lost");
}

// Batches numbered by a function of the step.
Recorded batches(std::function<uint64_t(size_t)> at, std::optional<size_t> resume) {
  Recorded run = changed(sound(), [&](RankRecord& r, size_t row) {
    r.batch_hash.set(row, 10'000 + 1000 * at(row) + r.header.rank, 0);
  });
  for (RankRecord& r : run.ranks) {
    if (resume) r.resumes.push_back({*resume, static_cast<uint32_t>(*resume), std::nullopt});
  }
  return run;
}

TEST(Findings, DataRepeats) {
  // From the start again, then on to data never read: not the end of an epoch.
  EXPECT_FOUND(alone(batches([](size_t t) { return t < 150 ? t : t - 150; }, 150)), "data-repeats",
               Severity::kHard);
  // The last ten batches again.
  EXPECT_FOUND(alone(batches([](size_t t) { return t < 150 ? t : t - 10; }, 150)), "data-repeats",
               Severity::kHard);
  // Perhaps an epoch of 200.
  EXPECT_FOUND(alone(batches([](size_t t) { return t % 200; }, 200)), "data-repeats", Severity::kWarning);
  // In the middle of the third epoch of 100 the loader starts again.
  EXPECT_FOUND(alone(batches([](size_t t) { return (t < 250 ? t : t - 250) % 100; }, 250)), "data-repeats",
               Severity::kHard);
  // Epochs.
  EXPECT_FOUND(alone(batches([](size_t t) { return t % 100; }, std::nullopt)), "data-repeats",
               Severity::kNote);
  EXPECT_ABSENT(alone(batches([](size_t t) { return t; }, 200)), "data-repeats");
  EXPECT_FOUND(alone(batches([](size_t t) { return t / 2; }, std::nullopt)), "data-repeats",
               Severity::kWarning);
}

TEST(Findings, DataOrder) {
  const auto same_seed = [](Recorded run) {
    for (RankRecord& r : run.ranks) r.header.seed = 1;
    return run;
  };
  const Recorded straight = batches([](size_t t) { return t; }, std::nullopt);
  EXPECT_FOUND(compared(straight, batches([](size_t t) { return t < 200 ? t : 1000 + t; }, 200)),
               "data-order-differs", Severity::kHard);
  EXPECT_FOUND(compared(straight, batches([](size_t t) { return t < 200 ? t : t - 200; }, 200)),
               "data-repeats", Severity::kHard);
  EXPECT_FOUND(compared(straight, batches([](size_t t) { return t ^ 1; }, std::nullopt)),
               "data-order-differs", Severity::kWarning);
  EXPECT_FOUND(compared(sound(), same_seed(sound(9))), "data-order-differs", Severity::kWarning);
  EXPECT_ABSENT(compared(sound(), sound(9)), "data-order-differs");
}

Recorded rates(std::function<double(double)> at) {
  return changed(
      sound(), [&](RankRecord& r, size_t row) { r.groups[0].lr.set(row, at(static_cast<double>(row)), 0); });
}
double cosine(double t) {
  return t < 20 ? 1e-3 * (t + 1) / 20 : 1e-3 * 0.5 * (1 + std::cos(M_PI * (t - 20) / 400));
}

TEST(Findings, Schedules) {
  const Recorded base = rates(cosine);
  EXPECT_FOUND(compared(base, rates([](double t) { return t == 0 ? 0 : cosine(t - 1); })), "schedule-shifted",
               Severity::kHard);
  EXPECT_FOUND(compared(base, rates([](double t) { return cosine(t + 4); })), "schedule-shifted",
               Severity::kHard);
  EXPECT_FOUND(compared(base, rates([](double t) { return cosine(4 * t); })), "schedule-stretched",
               Severity::kHard);
  EXPECT_FOUND(compared(base, rates([](double t) { return cosine(std::floor(t / 8)); })),
               "schedule-stretched", Severity::kHard);
  EXPECT_FOUND(compared(base, rates([](double t) { return 2 * cosine(t); })), "schedule-differs",
               Severity::kWarning);
  const Findings none = compared(base, base);
  for (const char* name : {"schedule-shifted", "schedule-stretched", "schedule-differs"})
    EXPECT_ABSENT(none, name);
  // A constant rate has no shift.
  EXPECT_FOUND(compared(rates([](double) { return 1e-3; }), rates([](double) { return 2e-3; })),
               "schedule-differs", Severity::kWarning);
  Recorded stretched = rates([](double t) { return cosine(4 * t); });
  for (RankRecord& r : stretched.ranks) r.header.accumulation = 4, r.header.warmup = 20;
  EXPECT_FOUND(alone(stretched), "schedule-stretched", Severity::kWarning);
}

TEST(Findings, GradientsScaled) {
  const auto scaled = [](Recorded run, double factor) {
    return changed(std::move(run), [=](RankRecord& r, size_t row) {
      r.groups[0].grad_norm.set(row, static_cast<float>(r.groups[0].grad_norm[row] * factor), 0);
    });
  };
  EXPECT_FOUND(compared(sound(), scaled(sound(), 2)), "gradients-scaled", Severity::kHard);
  EXPECT_FOUND(compared(sound(), scaled(sound(), 0.5)), "gradients-scaled", Severity::kHard);
  EXPECT_FOUND(compared(sound(), scaled(sound(), 1.37)), "gradients-scaled", Severity::kWarning);
  EXPECT_FOUND(compared(sound(), scaled(sound(9), 2)), "gradients-scaled",
               Severity::kHard);  // the number of ranks
  EXPECT_FOUND(compared(sound(), scaled(sound(9), 7)), "gradients-scaled",
               Severity::kWarning);  // of nothing known
  EXPECT_ABSENT(compared(sound(), scaled(sound(), 1.02)), "gradients-scaled");
  EXPECT_ABSENT(compared(sound(), scaled(sound(9), 1.3)), "gradients-scaled");
}

TEST(Findings, Clipping) {
  const auto clipped = [](double at, uint64_t seed) {
    Synthetic s;
    s.seed = seed;
    s.clip = at;
    return makeRun(s);
  };
  EXPECT_FOUND(compared(clipped(1, 1), clipped(0.5, 2)), "clipping-changed", Severity::kHard);
  EXPECT_FOUND(compared(clipped(1, 1), clipped(1e9, 2)), "clipping-changed", Severity::kHard);
  EXPECT_FOUND(compared(clipped(1e9, 1), clipped(1, 2)), "clipping-changed", Severity::kHard);
  EXPECT_ABSENT(compared(clipped(1, 1), clipped(1, 2)), "clipping-changed");
  EXPECT_ABSENT(compared(clipped(1e9, 1), clipped(1e9, 2)), "clipping-changed");
  // Clipped before the recorder looked, while still scaled.
  EXPECT_FOUND(compared(clipped(1, 1), changed(sound(2),
                                               [](RankRecord& r, size_t row) {
                                                 r.groups[0].grad_norm.set(row, 1e-5F, 0);
                                                 r.groups[0].grad_norm_clipped.set(row, 1e-5F, 0);
                                               })),
               "clipping-changed", Severity::kHard);
}

TEST(Findings, NeverTrained) {
  Synthetic s;
  s.drop = 0;
  EXPECT_FOUND(alone(makeRun(s)), "never-trained", Severity::kRefusal);
  s.drop = -1;
  EXPECT_FOUND(alone(makeRun(s)), "never-trained", Severity::kRefusal);
}

TEST(Findings, RecordIncomplete) {
  Recorded run = sound();
  run.ranks.pop_back();
  EXPECT_FOUND(alone(run), "record-incomplete", Severity::kWarning);
  Recorded cut = sound();
  cut.ranks[0].cut_short = true;
  EXPECT_FOUND(alone(cut), "record-incomplete", Severity::kNote);
  Recorded brief = sound();
  for (RankRecord& r : brief.ranks) r.truncate(15);
  EXPECT_FOUND(alone(brief), "record-incomplete", Severity::kNote);
  Recorded killed = sound();
  killed.ranks[1].truncate(300);
  EXPECT_FOUND(alone(killed), "record-incomplete", Severity::kWarning);
}

}  // namespace
}  // namespace halfwire::parity
