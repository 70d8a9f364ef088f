// Steps found in the sequence of collectives: of programs that repeat, that begin unevenly, and that do not.
#include "meter/steps.h"

#include <gtest/gtest.h>

#include <random>
#include <tuple>
#include <vector>

namespace halfwire::meter {
namespace {

struct Call {
  uint64_t hash;
  int64_t gap;  // host time before it
};

// Feeds `step` until `times` steps are done; the places in a step at which steps were said to begin, after
// `skip`.
std::vector<size_t> begins(StepFinder& finder, const std::vector<Call>& step, int times, int skip,
                           int64_t* clock) {
  std::vector<size_t> at;
  for (int n = 0; n < times; ++n) {
    for (size_t i = 0; i < step.size(); ++i) {
      *clock += step[i].gap;
      if (finder.onCollective(step[i].hash, *clock) && n >= skip) at.push_back(i);
    }
  }
  return at;
}

// FSDP in small: gathers ahead, then gather and reduce in turn, which looks like a period of one and then of
// two.
std::vector<Call> sharded(size_t layers) {
  std::vector<Call> step;
  for (size_t i = 0; i < layers; ++i) step.push_back({1, i == 0 ? 5000 : 10});
  for (size_t i = 0; i < layers; ++i) {
    step.push_back({1, 10});
    step.push_back({2, 10});
  }
  step.push_back({3, 50});
  return step;
}

TEST(Steps, BeginAtTheLongestPauseOfTheRepeatingSequence) {
  StepFinder finder;
  int64_t clock = 0;
  const std::vector<Call> step = {{7, 10}, {8, 10}, {7, 900}, {9, 10}, {8, 20}};
  const auto at = begins(finder, step, 50, 10, &clock);
  EXPECT_EQ(finder.period(), 5u);
  ASSERT_EQ(at.size(), 40u);
  for (const size_t i : at) EXPECT_EQ(i, 2u);
  EXPECT_EQ(finder.predicted(), finder.checked());
}

TEST(Steps, RunsOfEqualCallsInsideAStepAreNoSteps) {
  for (const size_t layers : {8u, 30u, 70u}) {
    StepFinder finder;
    int64_t clock = 0;
    const std::vector<Call> step = sharded(layers);
    const auto at = begins(finder, step, 30, 20, &clock);
    EXPECT_EQ(finder.period(), step.size()) << layers;
    ASSERT_EQ(at.size(), 10u) << layers;
    for (const size_t i : at) EXPECT_EQ(i, 0u);
  }
}

TEST(Steps, AnInterruptionIsForgotten) {
  StepFinder finder;
  int64_t clock = 0;
  const std::vector<Call> step = {{1, 500}, {2, 10}, {3, 10}, {3, 10}};
  (void)begins(finder, step, 20, 0, &clock);
  EXPECT_EQ(finder.period(), 4u);
  for (int i = 0; i < 37; ++i) finder.onCollective(100 + static_cast<uint64_t>(i % 5), clock += 10);
  (void)begins(finder, step, 200, 0, &clock);
  EXPECT_EQ(finder.period(), 4u);
  const auto at = begins(finder, step, 10, 0, &clock);
  EXPECT_EQ(at.size(), 10u);
  EXPECT_LT(finder.predicted(), finder.checked());
}

// A period that held and then broke was a run inside something longer: the next one is believed only when it
// has held for twice as long, and for no more than 512 calls.
TEST(Steps, APeriodThatBrokeMakesTheNextOneWait) {
  for (const auto& [run, least, most] :
       {std::tuple(10, 16, 20), std::tuple(100, 200, 210), std::tuple(5000, 512, 590)}) {
    StepFinder finder;
    int64_t clock = 0;
    for (int i = 0; i < run; ++i) finder.onCollective(1, clock += 10);
    EXPECT_EQ(finder.found(), run >= 16);
    int calls = 0;  // of two kinds in turn, of which the second breaks the run
    while (calls < 1000 && finder.period() != 2) finder.onCollective(calls++ % 2 == 0 ? 2 : 1, clock += 10);
    // The run's last call is part of the turns too.
    EXPECT_GE(calls + 1, least) << run;
    EXPECT_LE(calls + 1, most) << run;
  }
}

TEST(Steps, SequencesThatDoNotRepeatHaveNone) {
  StepFinder finder;
  std::mt19937_64 random(1);
  int64_t clock = 0;
  int begun = 0;
  for (int i = 0; i < 20'000; ++i) begun += finder.onCollective(random(), clock += 10) ? 1 : 0;
  EXPECT_EQ(begun, 0);
  EXPECT_FALSE(finder.found());
}

TEST(Steps, RandomPeriodsAreFound) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const size_t length = 1 + random() % 60;
    const uint64_t kinds = 1 + random() % 5;
    std::vector<Call> step(length);
    for (Call& c : step) c = {random() % kinds, 10};
    const size_t first = random() % length;
    step[first] = {99, 700};
    StepFinder finder;
    int64_t clock = 0;
    // A long warm-up: shorter periods may hold for a while within it.
    const auto at = begins(finder, step, 60, 40, &clock);
    ASSERT_EQ(finder.period(), length) << round;
    ASSERT_EQ(at.size(), 20u) << round;
    for (const size_t i : at) ASSERT_EQ(i, first) << round;
  }
}

}  // namespace
}  // namespace halfwire::meter
