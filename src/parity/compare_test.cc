// The verdict: what decides, what is refused, and how often it is wrong.
#include "parity/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "parity/curve.h"
#include "parity/error_rates.h"
#include "parity/reports.h"

namespace halfwire::parity {
namespace {

using ::testing::HasSubstr;

std::vector<::halfwire::parity::Run> runs(size_t n, double gap, uint64_t seed, double sd = 0.0005) {
  std::vector<::halfwire::parity::Run> all;
  for (size_t i = 0; i < n; ++i) {
    Synthetic s;
    s.seed = seed + i;
    s.gap = gap;
    s.run_noise = sd;
    s.noise = 0.01;
    all.push_back(makeRun(s));
  }
  return all;
}
const Finding* find(const Comparison& c, const std::string& name) {
  for (const Finding& f : c.findings) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

TEST(Compare, ThreeASideDecide) {
  const Comparison same = compareRuns({runs(3, 0, 1), runs(3, 0, 11), {}});
  EXPECT_EQ(same.verdict, Verdict::kEquivalent) << same.reason;
  EXPECT_EQ(same.exit_code, 0);
  EXPECT_EQ(same.noise.source, NoiseFloor::Source::kRepeats);
  const Comparison apart = compareRuns({runs(3, 0, 1), runs(3, 0.05, 11), {}});
  EXPECT_EQ(apart.verdict, Verdict::kDifferent) << apart.reason;
  EXPECT_EQ(apart.exit_code, 1);
  // A candidate that is better is different too.
  EXPECT_EQ(compareRuns({runs(3, 0.05, 1), runs(3, 0, 11), {}}).verdict, Verdict::kDifferent);
  const Comparison noisy = compareRuns({runs(3, 0, 1, 0.05), runs(3, 0, 11, 0.05), {}});
  EXPECT_EQ(noisy.verdict, Verdict::kUndecided);
  EXPECT_EQ(noisy.exit_code, 2);
  EXPECT_GT(noisy.runs_needed.value_or(0), 3U);
}

TEST(Compare, OneASideIsNeverEquivalent) {
  const Comparison one = compareRuns({runs(1, 0, 1), runs(1, 0, 11), {}});
  EXPECT_EQ(one.verdict, Verdict::kUndecided);
  EXPECT_THAT(one.reason, HasSubstr("one run a side"));
  EXPECT_GE(one.runs_needed.value_or(0), 3U);
  EXPECT_TRUE(one.runs_needed_is_least);
  // Nor a run beside itself, nor two beside two.
  EXPECT_EQ(compareRuns({runs(1, 0, 1), runs(1, 0, 1), {}}).verdict, Verdict::kUndecided);
  EXPECT_EQ(compareRuns({runs(2, 0, 1), runs(2, 0, 11), {}}).verdict, Verdict::kUndecided);
  EXPECT_EQ(compareRuns({runs(3, 0, 1), runs(1, 0, 11), {}}).verdict, Verdict::kUndecided);
  // A gap past the gross bound is different.
  const Comparison gross = compareRuns({runs(1, 0, 1), runs(1, 0.4, 11), {}});
  EXPECT_EQ(gross.verdict, Verdict::kDifferent);
  EXPECT_THAT(gross.reason, HasSubstr("gross"));
}

TEST(Compare, CopiesCountOnce) {
  auto copies = runs(1, 0, 1);
  copies.push_back(copies.front());
  copies.push_back(copies.front());
  const Comparison c = compareRuns({copies, runs(3, 0, 11), {}});
  EXPECT_EQ(c.verdict, Verdict::kUndecided);
  ASSERT_NE(find(c, "runs-identical"), nullptr);
  EXPECT_FALSE(c.runs[2].counted);
}

TEST(Compare, NoiseRunsAreAFloor) {
  const Comparison c = compareRuns({runs(1, 0, 1), runs(1, 0, 11), runs(4, 0, 21)});
  EXPECT_EQ(c.verdict, Verdict::kEquivalent) << c.reason;
  EXPECT_EQ(c.noise.source, NoiseFloor::Source::kNoiseRuns);
  EXPECT_EQ(c.noise.runs, 4U);
  EXPECT_EQ(compareRuns({runs(1, 0, 1), runs(1, 0.05, 11), runs(4, 0, 21)}).verdict, Verdict::kDifferent);
  // Two are too few.
  EXPECT_EQ(compareRuns({runs(1, 0, 1), runs(1, 0, 11), runs(2, 0, 21)}).verdict, Verdict::kUndecided);
  // Twins with one seed hold no noise of seeds; with that seed on both sides they do.
  auto twins = runs(4, 0, 21);
  for (auto& run : twins) {
    for (RankRecord& r : run.ranks) r.header.seed = 1;
  }
  const Comparison other = compareRuns({runs(1, 0, 1), runs(1, 0, 11), twins});
  EXPECT_EQ(other.verdict, Verdict::kUndecided);
  EXPECT_THAT(other.reason, HasSubstr("seed"));
  auto candidate = runs(1, 0, 11);
  for (RankRecord& r : candidate[0].ranks) r.header.seed = 1;
  const Comparison same = compareRuns({runs(1, 0, 1), candidate, twins});
  EXPECT_EQ(same.verdict, Verdict::kEquivalent) << same.reason;
  EXPECT_EQ(same.noise.runs, 5U);  // the baseline is one of them
}

TEST(Compare, PairedRunsAreCompared) {
  auto baseline = runs(3, 0, 1, 0.05), candidate = baseline;
  for (size_t i = 0; i < 3; ++i) {
    for (RankRecord& r : candidate[i].ranks) {
      for (size_t row = 0; row < r.rows(); ++row)
        r.loss.set(row, r.loss[row] + 1e-4 * (1 + i) * std::sin(0.1 * row), 0);
    }
  }
  const Comparison c = compareRuns({baseline, candidate, {}});
  EXPECT_EQ(c.paired, 3U);
  EXPECT_EQ(c.difference->method, Difference::Method::kPaired);
  EXPECT_EQ(c.verdict, Verdict::kEquivalent) << c.reason;
  // Noise runs of other seeds, whose spread is far above these gaps, do not blunt the pairs.
  const Comparison beside = compareRuns({baseline, candidate, runs(3, 0, 31, 0.05)});
  EXPECT_EQ(beside.noise.source, NoiseFloor::Source::kNoiseRuns);
  EXPECT_EQ(beside.difference->method, Difference::Method::kPaired);
  EXPECT_EQ(beside.verdict, Verdict::kEquivalent) << beside.reason;
  // One batch that differs, at one rank, and there is no pairing.
  candidate[1].ranks[1].batch_hash.set(200, 5, 0);
  EXPECT_EQ(compareRuns({baseline, candidate, {}}).difference->method, Difference::Method::kWelch);
}

TEST(Compare, WhatDoesNotLearnIsRefused) {
  const auto flat = [](uint64_t seed) {
    std::vector<::halfwire::parity::Run> all;
    for (uint64_t i = 0; i < 3; ++i) {
      Synthetic s;
      s.seed = seed + i;
      s.drop = 0.02;  // 1 % of the loss, thrice the margin
      s.run_noise = 0.0002;
      s.noise = 0.001;
      all.push_back(makeRun(s));
    }
    return all;
  };
  const Comparison c = compareRuns({flat(1), flat(11), {}});
  EXPECT_EQ(c.verdict, Verdict::kUndecided);
  EXPECT_EQ(c.exit_code, 2);
  ASSERT_NE(find(c, "never-trained"), nullptr);
  CompareOptions fine;
  fine.margin = 0.0005;
  EXPECT_EQ(compareRuns({flat(1), flat(11), {}}, fine).verdict, Verdict::kEquivalent);
}

// A fault of both sides is no difference between them, and no ground to call them equivalent.
TEST(Compare, FaultsOfTheBaseline) {
  const auto faulty = [](std::vector<::halfwire::parity::Run> all) {
    for (auto& run : all) {
      for (RankRecord& r : run.ranks) r.header.tied_expected = true;
    }
    return all;
  };
  const Comparison candidate = compareRuns({runs(3, 0, 1), faulty(runs(3, 0, 11)), {}});
  EXPECT_EQ(candidate.verdict, Verdict::kDifferent);
  EXPECT_THAT(candidate.reason, HasSubstr("tying-lost"));
  EXPECT_EQ(compareRuns({faulty(runs(3, 0, 1)), faulty(runs(3, 0, 11)), {}}).verdict, Verdict::kUndecided);
  EXPECT_EQ(compareRuns({faulty(runs(1, 0, 1)), {}, {}}).exit_code, 1);
  EXPECT_EQ(compareRuns({runs(1, 0, 1), {}, {}}).exit_code, 0);
}

TEST(Compare, MarginInStepsAndInLoss) {
  CompareOptions options;
  options.margin_absolute = 0.02;
  const Comparison c = compareRuns({runs(3, 0, 1), runs(3, 0, 11), {}}, options);
  EXPECT_EQ(c.difference->margin, 0.02);
  ASSERT_TRUE(c.difference->margin_steps.has_value());
  options.margin_absolute.reset();
  options.margin_steps = static_cast<uint64_t>(std::llround(*c.difference->margin_steps));
  EXPECT_NEAR(compareRuns({runs(3, 0, 1), runs(3, 0, 11), {}}, options).difference->margin, 0.02, 0.004);
}

// On a straight line the answer is known.
TEST(Compare, EquivalentStepsOfAStraightLine) {
  LossSeries s;
  for (uint32_t t = 0; t < 1000; ++t) {
    s.step.push_back(t);
    s.loss.push_back(10 - 0.01 * t);
  }
  const Curve curve(s.between(0, 1000), 800);
  EXPECT_NEAR(curve.tail(), 10 - 0.01 * 899.5, 1e-9);
  EXPECT_NEAR(*curve.stepsTo(0.5), 50, 1);
  EXPECT_NEAR(*curve.stepsTo(-0.5), -50, 1);
  EXPECT_NEAR(*curve.above(50), 0.5, 0.01);
  EXPECT_FALSE(curve.stepsTo(100).has_value());
  EXPECT_FALSE(curve.above(10'000).has_value());
}

TEST(Compare, TooShortOrNothingInCommon) {
  auto shorter = runs(1, 0, 1);
  for (RankRecord& r : shorter[0].ranks) r.truncate(30);
  const Comparison c = compareRuns({shorter, runs(1, 0, 11), {}});
  EXPECT_EQ(c.verdict, Verdict::kUndecided);
  EXPECT_THAT(c.reason, HasSubstr("at least 10 are needed"));
  ASSERT_NE(find(c, "lengths-differ"), nullptr);
  auto later = runs(1, 0, 11);
  for (RankRecord& r : later[0].ranks) {
    for (uint32_t& step : r.step) step += 10'000;
  }
  EXPECT_THAT(compareRuns({runs(1, 0, 1), later, {}}).reason, HasSubstr("no steps in common"));
}

TEST(Compare, SaysWhereRunsPart) {
  auto candidate = runs(1, 0, 1);
  candidate[0].ranks[1].groups[0].grad_norm.set(37, 100, 0);
  const Comparison c = compareRuns({runs(1, 0, 1), candidate, {}});
  ASSERT_EQ(c.partings.size(), 2U);
  EXPECT_EQ(c.partings[0].step, 37U);
  EXPECT_EQ(c.partings[0].rank, 1);
  EXPECT_EQ(c.partings[0].quantity, "grad_norm");
  // Of other seeds nothing is to be expected.
  EXPECT_TRUE(compareRuns({runs(1, 0, 1), runs(1, 0, 2), {}}).partings.empty());
}

TEST(Compare, GrowingBiasIsSeen) {
  const auto grown = [](double end) {
    auto all = runs(3, 0, 11, 0.0005);
    for (auto& run : all) {
      for (RankRecord& r : run.ranks) {
        for (size_t row = 0; row < r.rows(); ++row) r.loss.set(row, r.loss[row] + end * row / r.rows(), 0);
      }
    }
    return all;
  };
  ASSERT_NE(find(compareRuns({runs(3, 0, 1), grown(0.03), {}}), "bias-grows"), nullptr);
  EXPECT_EQ(find(compareRuns({runs(3, 0, 1), grown(0), {}}), "bias-grows"), nullptr);
}

// The quick form of what parity_error_rates measures.
TEST(Compare, SoundRepeatsAreNotCalledDifferent) {
  const Scenario quiet{"", 3, 3, 0, 0.002, 0}, loud{"", 3, 3, 0, 0.01, 0}, one{"", 1, 1, 0, 0.01, 0};
  for (const Scenario& s : {quiet, loud, one}) {
    const Counts c = measure(s, 60, 77'000);
    EXPECT_EQ(c.different, 0U);
    EXPECT_EQ(c.hard, 0U);
  }
}
TEST(Compare, TrueGapsAreNotCalledEquivalent) {
  const Counts at_margin = measure({"", 5, 5, 0, 0.002, 0.005}, 100, 99'000);
  EXPECT_LE(at_margin.equivalent, 10U);
  const Counts thrice = measure({"", 5, 5, 0, 0.002, 0.015}, 60, 199'000);
  EXPECT_EQ(thrice.equivalent, 0U);
  EXPECT_GT(thrice.different, 40U);
}
TEST(Compare, UpperLimitsOfRates) {
  EXPECT_NEAR(upperLimit(0, 200), 0.0149, 1e-4);  // Clopper and Pearson; the rule of three says 0.015
  EXPECT_NEAR(upperLimit(3, 400), 0.0193, 1e-4);
  EXPECT_EQ(upperLimit(5, 5), 1);
}

TEST(Reports, JsonSaysWhatWasFound) {
  const Comparison c = compareRuns({runs(3, 0, 1), runs(3, 0.05, 11), {}});
  const auto j = nlohmann::json::parse(parityJson(c));
  EXPECT_EQ(j["verdict"], "different");
  EXPECT_EQ(j["exit_code"], 1);
  EXPECT_EQ(j["noise_floor"]["source"], "repeats");
  EXPECT_NEAR(j["difference"]["value"], 0.05, 0.01);
  EXPECT_EQ(j["difference"]["method"], "welch");
  EXPECT_TRUE(j["findings"].is_array());
  EXPECT_EQ(j["runs"].size(), 6U);
  const auto alone = nlohmann::json::parse(parityJson(compareRuns({runs(1, 0, 1), {}, {}})));
  EXPECT_EQ(alone["question"], "alone");
  EXPECT_EQ(alone["difference"], nullptr);
}

// Names from files reach neither the terminal nor the page as code.
TEST(Reports, NamesAreHarmless) {
  auto run = runs(1, 0, 1);
  run[0].path = "</script><script>alert(1)</script>\x1b[31m\xff";
  const Inputs inputs{run, {}, {}};
  const Comparison c = compareRuns(inputs);
  EXPECT_EQ(parityText(c).find('\x1b'), std::string::npos);
  const std::string html = parityHtml(c, inputs);
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  for (const char* outside : {"https:", "//cdn", " src=", "<link", "@import", "fetch("})
    EXPECT_EQ(html.find(outside), std::string::npos) << outside;
}

}  // namespace
}  // namespace halfwire::parity
