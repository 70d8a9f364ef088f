// `halfwire bench step` and `halfwire report` from outside, on the host engine: what the meter finds is what
// the kernels' own times say, and merging moves the same bytes in fewer calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support/launch.h"

namespace halfwire {
namespace {

using ::testing::HasSubstr;

nlohmann::json json(const testing::CommandOutcome& outcome) {
  EXPECT_TRUE(outcome.ok()) << outcome.describe();
  return nlohmann::json::parse(outcome.output, nullptr, false);
}

testing::CommandOutcome run(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {HALFWIRE_COMMAND};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  testing::CommandOptions options;
  options.timeout_s = 100;
  return testing::runCommand(argv, options);
}

TEST(BenchStep, MeteredIsTrueAndMergingMovesTheSameBytes) {
  const testing::TemporaryDirectory logs;
  const auto result = json(run({"bench", "step", "--preset", "ddp", "-n", "2", "--steps", "40",
                                "--meter-every", "1", "--link", "300Mbit", "--log", logs.path(), "--json"}));
  ASSERT_EQ(result["rows"].size(), 2u) << result;
  for (const auto& row : result["rows"]) {
    const double metered = row["exposed_metered_ms"].get<double>();
    const double truth = row["exposed_true_ms"].get<double>();
    EXPECT_LE(std::abs(metered - truth), std::max(0.5, 0.1 * truth)) << row;
  }
  const auto& overlapped = result["rows"][0];
  const auto& merged = result["rows"][1];
  EXPECT_EQ(overlapped["schedule"], "overlapped");
  EXPECT_EQ(overlapped["calls"], 8);
  EXPECT_EQ(merged["calls"], 1);
  EXPECT_EQ(overlapped["bytes_sent"], merged["bytes_sent"]);
  EXPECT_GT(merged["exposed_true_ms"].get<double>(), overlapped["exposed_true_ms"].get<double>());
  EXPECT_GT(merged["step_ms"].get<double>(), overlapped["step_ms"].get<double>());

  const auto text = run({"report", "--compare", logs.path() + "/overlapped", logs.path() + "/merged"});
  EXPECT_TRUE(text.ok()) << text.describe();
  EXPECT_THAT(text.output, HasSubstr("B sends the same bytes in 1 call instead of 8, yet its step is"));
  const auto one = json(run({"report", logs.path() + "/merged", "--json"}));
  EXPECT_EQ(one["ranks"].size(), 2u);
  EXPECT_EQ(one["collectives"][0]["operation"], "AllReduce");
}

TEST(BenchStep, BadInputIsRefusedInOneSentence) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"bench", "step", "--preset", "none"},
                                             {"bench", "step", "--schedule", "none"},
                                             {"bench", "step", "-n", "1"},
                                             {"report", "/nonexistent/halfwire"},
                                             {"report", "--compare", "one"}}) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.describe();
    EXPECT_THAT(outcome.errors, HasSubstr("halfwire "));
  }
}

}  // namespace
}  // namespace halfwire
