// Statistics against published tables, SciPy's values and simulation.
#include "parity/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace halfwire::parity {
namespace {

// scipy.special.betainc 1.17.1
TEST(Statistics, IncompleteBeta) {
  EXPECT_NEAR(incompleteBeta(0.5, 0.5, 0.3) / 0.3690101195655454, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(2, 3, 0.5) / 0.6875, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(1, 0.5, 0.9) / 0.6837722339831621, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(50, 0.5, 0.99) / 0.3173043978741973, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(0.5, 0.5, 1e-08) / 6.366197734286143e-05, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(200, 0.5, 0.999) / 0.5272441070252349, 1, 1e-11);
  EXPECT_NEAR(incompleteBeta(7.3, 0.5, 0.2) / 1.786360505249262e-06, 1, 1e-11);
  EXPECT_EQ(incompleteBeta(2, 3, 0), 0);
  EXPECT_EQ(incompleteBeta(2, 3, 1), 1);
}

// scipy.stats.t 1.17.1
TEST(Statistics, StudentDistribution) {
  EXPECT_NEAR(studentCdf(-2.5, 4) / 0.03338327240599407, 1, 1e-10);
  EXPECT_NEAR(studentCdf(0.7, 2.37) / 0.7268406573074792, 1, 1e-10);
  EXPECT_NEAR(studentCdf(-12, 3) / 0.0006225079003946681, 1, 1e-10);
  EXPECT_NEAR(studentCdf(1.96, 1000000) / 0.9750019662073651, 1, 1e-10);
  EXPECT_NEAR(studentCdf(-3.1, 1) / 0.09932609219911853, 1, 1e-10);
  EXPECT_NEAR(studentCdf(-40, 7.5) / 2.559528381854894e-10, 1, 1e-10);
  EXPECT_NEAR(studentCdf(4.2, 3.3) / 0.9898166684302395, 1, 1e-10);
  EXPECT_NEAR(studentQuantile(0.95, 2.37) / 2.631661501379304, 1, 1e-10);
  EXPECT_NEAR(studentQuantile(0.995, 5.5) / 3.849911466001036, 1, 1e-10);
  EXPECT_NEAR(studentQuantile(0.001, 1) / -318.3088389855504, 1, 1e-10);
}

// Two-sided 95 % and 99 % points as printed in tables of the t distribution.
TEST(Statistics, StudentQuantilesAsInTables) {
  const double table[][3] = {{1, 12.706, 63.657}, {2, 4.303, 9.925},  {4, 2.776, 4.604},
                             {10, 2.228, 3.169},  {30, 2.042, 2.750}, {120, 1.980, 2.617}};
  for (const auto& [df, q95, q99] : table) {
    EXPECT_NEAR(studentQuantile(0.975, df), q95, 6e-4) << df;
    EXPECT_NEAR(studentQuantile(0.995, df), q99, 6e-4) << df;
    EXPECT_NEAR(studentQuantile(0.025, df), -q95, 6e-4) << df;
  }
  EXPECT_EQ(studentQuantile(0.5, 3), 0);
  EXPECT_NEAR(normalQuantile(0.975), 1.959963984540054, 1e-12);
}

// scipy.stats.ttest_ind(..., equal_var=False), and both one-sided tests of it after a shift by the margin.
TEST(Statistics, WelchAndTwoOneSidedTests) {
  {
    const std::vector<double> a{2.001, 2.013, 1.998}, b{2.004, 1.999, 2.01, 2.006};
    const Estimate e = welch(moments(a), moments(b));
    EXPECT_NEAR(e.df, 2.996189268834807, 1e-9);
    EXPECT_NEAR(e.value / e.standard_error, 0.146443134832186, 1e-9);
    EXPECT_NEAR(equivalenceP(e, 0.02), 0.01649568208593764, 1e-10);
    EXPECT_NEAR(confidence(e, 0.99).low, -0.02920162957613867, 1e-10);
    EXPECT_NEAR(confidence(e, 0.99).high, 0.03070162957613873, 1e-10);
  }
  {
    const std::vector<double> a{3.1, 3.3, 3.2, 3.0}, b{3.5, 3.6, 3.4};
    const Estimate e = welch(moments(a), moments(b));
    EXPECT_NEAR(e.df, 4.959183673469386, 1e-9);
    EXPECT_NEAR(e.value / e.standard_error, 4.041451884327375, 1e-9);
    EXPECT_NEAR(equivalenceP(e, 0.1), 0.982676223355857, 1e-10);
    EXPECT_NEAR(confidence(e, 0.99).low, -0.0006775926177378655, 1e-10);
    EXPECT_NEAR(confidence(e, 0.99).high, 0.7006775926177371, 1e-10);
  }
}

TEST(Statistics, NoVarianceIsNoDivisionByZero) {
  const std::vector<double> a{2, 2, 2};
  const Estimate e = welch(moments(a), moments(a));
  EXPECT_EQ(e.standard_error, 0);
  EXPECT_EQ(equivalenceP(e, 0.1), 0);
  EXPECT_EQ(equivalenceP(e, 0), 1);
  EXPECT_EQ(equivalenceP({0.2, 0, 4}, 0.1), 1);
}

// Three a side pass only where the margin is past 1.74 standard deviations, and with 80 % power past about 3.
TEST(Statistics, RunsNeeded) {
  EXPECT_EQ(runsNeeded(1, 3.05), 3U);
  EXPECT_GT(*runsNeeded(1, 2.9), 3U);
  EXPECT_FALSE(runsNeeded(1, 0.001).has_value());
  EXPECT_FALSE(runsNeeded(1, 0).has_value());
  const Estimate three{0, std::sqrt(2.0 / 3), 4};
  EXPECT_LT(equivalenceP(three, 1.745), 0.05);
  EXPECT_GT(equivalenceP(three, 1.735), 0.05);
}

// What `runsNeeded` promises, by simulation: 80 % of experiments with no true difference pass.
TEST(Statistics, RunsNeededHasItsPower) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const double margin = 1.5;
  const size_t n = *runsNeeded(1, margin);
  size_t passed = 0;
  constexpr size_t kTrials = 4000;
  for (size_t trial = 0; trial < kTrials; ++trial) {
    std::vector<double> a(n), b(n);
    for (double& v : a) v = normal(random);
    for (double& v : b) v = normal(random);
    passed += equivalenceP(welch(moments(a), moments(b)), margin) < 0.05;
  }
  EXPECT_GT(static_cast<double>(passed) / kTrials, 0.77);
  EXPECT_LT(static_cast<double>(passed) / kTrials, 0.90);
}

// At a true difference of exactly the margin, no more than 5 % pass.
TEST(Statistics, EquivalenceKeepsItsLevel) {
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  size_t passed = 0;
  constexpr size_t kTrials = 20000;
  for (size_t trial = 0; trial < kTrials; ++trial) {
    std::vector<double> a(4), b(3);
    for (double& v : a) v = normal(random);
    for (double& v : b) v = 4 + normal(random);
    passed += equivalenceP(welch(moments(a), moments(b)), 4) < 0.05;
  }
  // Welch's approximation at 3 and 4 runs; three standard errors of the count are 0.46 %.
  EXPECT_LT(static_cast<double>(passed) / kTrials, 0.056);
  EXPECT_GT(static_cast<double>(passed) / kTrials, 0.03);
}

std::vector<double> autoregressive(size_t n, double phi, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> v(n);
  double x = normal(random) / std::sqrt(1 - phi * phi);
  for (double& out : v) {
    out = x;
    x = phi * x + normal(random);
  }
  return v;
}

// An autoregressive series of order 1 has tau = (1 + phi) / (1 - phi).
TEST(Statistics, AutocorrelationTimeOfAnAutoregressiveSeries) {
  for (const double phi : {0.0, 0.5, 0.9}) {
    const double tau = (1 + phi) / (1 - phi);
    EXPECT_NEAR(autocorrelationTime(autoregressive(10'000, phi, 3)) / tau, 1, 0.15) << phi;
  }
  // Long enough to be averaged first.
  EXPECT_NEAR(autocorrelationTime(autoregressive(400'000, 0.99, 5)) / 199, 1, 0.2);
  EXPECT_NEAR(autocorrelationTime(autoregressive(400'000, 0.5, 5)) / 3, 1, 0.2);
  EXPECT_EQ(autocorrelationTime(std::vector<double>(100, 2.0)), 1);
}

// The error of the mean of a correlated series is what its spread over many series is.
TEST(Statistics, BatchMeansKnowTheErrorOfAMean) {
  std::vector<double> means, errors;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto b = batchMeans(autoregressive(4000, 0.8, 100 + seed));
    ASSERT_TRUE(b.has_value());
    EXPECT_GE(b->batches, 20U);
    EXPECT_GE(static_cast<double>(b->length), 2 * b->tau);
    means.push_back(b->mean.value);
    errors.push_back(b->mean.standard_error);
  }
  EXPECT_NEAR(moments(errors).mean / std::sqrt(moments(means).variance), 1, 0.12);
  EXPECT_FALSE(batchMeans(autoregressive(300, 0.9, 1)).has_value());
}

TEST(Statistics, Median) {
  EXPECT_EQ(median(std::vector<double>{3, 1, 2}), 2);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3, 2}), 2.5);
  EXPECT_TRUE(std::isnan(median({})));
}

}  // namespace
}  // namespace halfwire::parity
