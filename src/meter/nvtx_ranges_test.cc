// Steps from a program's own NVTX ranges, from `halfwire run` to the report, on the host engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "policy/run_log_json.h"
#include "support/launch.h"

namespace halfwire {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

testing::CommandOutcome run(const std::string& way, const std::string& log,
                            const testing::Environment& env = {}) {
  testing::CommandOptions options;
  options.env = {{"NVTX_INJECTION64_PATH", ""}};
  for (const auto& [name, value] : env) options.env[name] = value;
  return testing::runCommand({HALFWIRE_COMMAND, "run", "--mode", "meter", "--meter-every", "1", "--log", log,
                              "-n", "2", "--", HALFWIRE_RANGES_PROGRAM, way},
                             options);
}

RunLogMeterRecord meterOf(const std::string& log) {
  auto record = readRunLogJson(log + "/rank1.json");
  EXPECT_TRUE(record.ok()) << record.status().message();
  return record.ok() ? record.value().meter : RunLogMeterRecord{};
}

TEST(NvtxRanges, EveryKindOfRangeBeginsAStep) {
  for (const auto& [way, name] :
       {std::pair("push", "iteration"), std::pair("wide", "iteration"), std::pair("event", "ProfilerStep"),
        std::pair("start", "train_step"), std::pair("registered", "step"), std::pair("inner", "iteration")}) {
    const testing::TemporaryDirectory log;
    const auto ran = run(way, log.path());
    ASSERT_TRUE(ran.ok()) << ran.describe();
    // As without a tool, for the program and for whoever asks whether there is one.
    EXPECT_THAT(ran.output, HasSubstr(std::string("returned ") + (way == std::string("start") ? "0" : "-2") +
                                      ", domain 0"));
    const RunLogMeterRecord m = meterOf(log.path());
    EXPECT_EQ(m.source, StepSource::kRange) << way;
    EXPECT_EQ(m.range, name);
    EXPECT_EQ(m.steps_begun, 40u) << way;
    ASSERT_EQ(m.steps.size(), 39u) << way;  // the last has not ended
    for (const RunLogStepRecord& s : m.steps) EXPECT_EQ(s.calls, 3u) << way << " step " << s.number;
    EXPECT_THAT(ran.errors, HasSubstr("2 rank(s): steps from: NVTX range '" + std::string(name) + "'"));
  }
}

TEST(NvtxRanges, HalfwireStepWins) {
  const testing::TemporaryDirectory log;
  const auto ran = run("marked", log.path());
  ASSERT_TRUE(ran.ok()) << ran.describe();
  const RunLogMeterRecord m = meterOf(log.path());
  EXPECT_EQ(m.source, StepSource::kMarked);
  ASSERT_GE(m.steps.size(), 19u);
  for (size_t i = 2; i < m.steps.size(); ++i) EXPECT_EQ(m.steps[i].calls, 6u);
}

TEST(NvtxRanges, AnotherNameIsGivenAndChecked) {
  const testing::TemporaryDirectory log;
  ASSERT_TRUE(run("epoch", log.path()).ok());
  EXPECT_EQ(meterOf(log.path()).source, StepSource::kNone);
  const testing::TemporaryDirectory named;
  ASSERT_TRUE(run("epoch", named.path(), {{"HALFWIRE_METER_RANGE", "epoch"}}).ok());
  EXPECT_EQ(meterOf(named.path()).range, "epoch");
  EXPECT_EQ(meterOf(named.path()).steps.size(), 39u);
  const auto refused = run("push", named.path(), {{"HALFWIRE_METER_RANGE", " epoch"}});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("HALFWIRE_METER_RANGE=' epoch' is not valid"));
}

TEST(NvtxRanges, AToolThatIsThereKeepsThem) {
  for (const testing::Environment& env : {testing::Environment{{"NVTX_INJECTION64_PATH", "/nowhere/tool.so"}},
                                          testing::Environment{{"CUDA_INJECTION64_PATH", "/nowhere/tool.so"}},
                                          testing::Environment{{"NSYS_PROFILING_SESSION_ID", "1"}},
                                          testing::Environment{{"HALFWIRE_METER_RANGE", "off"}}}) {
    const testing::TemporaryDirectory log;
    const auto ran = run("push", log.path(), env);
    ASSERT_TRUE(ran.ok()) << ran.describe();
    EXPECT_THAT(ran.output, Not(HasSubstr("halfwire")));
    EXPECT_EQ(meterOf(log.path()).source, StepSource::kNone);
  }
}

TEST(NvtxRanges, WithoutTheMeterNobodyListens) {
  testing::CommandOptions options;
  options.env = {{"NVTX_INJECTION64_PATH", HALFWIRE_NVTX_LIBRARY},
                 {"RANK", "0"},
                 {"WORLD_SIZE", "1"},
                 {"MASTER_ADDR", "127.0.0.1"},
                 {"MASTER_PORT", "29999"}};
  const auto ran = testing::runCommand({HALFWIRE_RANGES_PROGRAM, "push"}, options);
  EXPECT_TRUE(ran.ok()) << ran.describe();
  EXPECT_THAT(ran.output, HasSubstr("returned -2, domain 0"));
}

}  // namespace
}  // namespace halfwire
