// What the report makes of run logs: means, sizes, skew, notes and verdicts from figures known by
// construction.
#include "meter/meter_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace halfwire::meter {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kMs = 1'000'000;

// Rank `rank` of 2: 12 steps of `step_ms`, the first two warm-up, every second one sampled with `exposed_ms`.
RunLogRecord record(int rank, double step_ms, double exposed_ms, uint64_t calls = 8,
                    uint64_t sent = 3'000'000) {
  RunLogRecord r;
  r.rank = rank;
  r.world = 2;
  r.host = "host";
  r.settings = "off, meter on";
  r.communicators_made = 1;
  RunLogComm& comm = r.communicators.emplace_back();
  comm.ranks = 2;
  comm.rank = static_cast<uint32_t>(rank);
  RunLogSized size;
  size.size_bucket = 1 << 20;
  size.calls = calls * 12;
  size.bytes_sent = sent * 12;
  size.exposed_ns = static_cast<uint64_t>(exposed_ms * 5 * kMs);
  comm.sizes.push_back(size);
  RunLogMeterRecord& m = r.meter;
  m.state = MeterState::kOn;
  m.source = StepSource::kMarked;
  m.every = 2;
  m.warmup = 2;
  m.collectives = calls * 12;
  m.event_calls = 100;
  m.steps_begun = 13;
  for (uint64_t i = 0; i < 12; ++i) {
    RunLogStepRecord s;
    s.number = i;
    s.begin_ns = i * static_cast<uint64_t>(step_ms) * kMs + static_cast<uint64_t>(rank) * kMs / 4;
    s.duration_ns = static_cast<uint64_t>(step_ms * kMs);
    s.calls = calls;
    s.bytes_asked = s.bytes_ring = s.bytes_sent = sent;
    s.host_blocked_ns = 2 * kMs;
    s.sampled = i % 2 == 0;
    s.measured = s.sampled && i >= 2;
    s.exposed_ns = s.measured ? static_cast<uint64_t>(exposed_ms * kMs) : 0;
    if (i < 2) s.duration_ns *= 50;  // a warm-up that must not count
    m.steps.push_back(s);
  }
  return r;
}

RunSummary run(double step_ms, double exposed_ms, uint64_t calls = 8, uint64_t sent = 3'000'000) {
  return summarize({record(0, step_ms, exposed_ms, calls, sent), record(1, step_ms, exposed_ms, calls, sent)},
                   "run");
}

TEST(MeterReport, MeansLeaveOutWarmUpAndUnmeasuredSteps) {
  RunLogRecord r = record(0, 20, 4);
  r.meter.steps[4].exposed_ns = 900 * kMs;  // measured in part only
  r.meter.steps[4].unmeasured = 1;
  const RunSummary s = summarize({r, record(1, 20, 4)}, "run");
  ASSERT_EQ(s.ranks.size(), 2u);
  EXPECT_DOUBLE_EQ(s.step_ms, 20);
  EXPECT_DOUBLE_EQ(s.exposed_ms, 4);
  EXPECT_DOUBLE_EQ(s.host_blocked_ms, 2);
  EXPECT_DOUBLE_EQ(s.sent, 3e6);
  EXPECT_EQ(s.ranks[0].measured, 4u);
  ASSERT_EQ(s.sizes.size(), 1u);
  EXPECT_DOUBLE_EQ(s.sizes[0].calls, 8);
  EXPECT_DOUBLE_EQ(s.sizes[0].exposed_ms, 4);
  EXPECT_DOUBLE_EQ(s.skew_median_ms, 0.25);
  EXPECT_EQ(s.waited_for, -1);
}

TEST(MeterReport, TheRankThatIsExposedLeastIsWaitedFor) {
  const RunSummary s = summarize({record(0, 20, 5), record(1, 20, 1)}, "run");
  EXPECT_EQ(s.waited_for, 1);
  EXPECT_DOUBLE_EQ(s.sizes[0].exposed_most_ms, 5);
}

TEST(MeterReport, WhatIsMissingIsSaid) {
  RunLogRecord blind = record(0, 20, 0);
  blind.meter.event_calls = 0;
  RunLogRecord refused = record(1, 20, 0);
  refused.meter.state = MeterState::kRefused;
  refused.meter.words = "CUDA_DEVICE_MAX_CONNECTIONS=1: no";
  const std::string text = reportText(summarize({blind, refused}, "run"));
  EXPECT_THAT(text, HasSubstr("linked statically"));
  EXPECT_THAT(text, HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS=1: no"));
  RunLogRecord stepless = record(0, 20, 0);
  stepless.meter.source = StepSource::kNone;
  stepless.meter.steps.clear();
  EXPECT_THAT(reportText(summarize({stepless}, "run")), HasSubstr("nothing was sampled"));
  EXPECT_THAT(reportText(run(20, 4)), HasSubstr("busy time of collectives is not shown"));
}

TEST(MeterReport, VerdictsNameTheCause) {
  EXPECT_THAT(
      verdict(run(70, 4), run(92, 26, 1)),
      HasSubstr(
          "the same bytes in 1 call instead of 8, yet its step is 22.00 ms (31.4 %) longer: streams wait "
          "26.00 ms for collectives instead of 4.00 ms, since what had been hidden"));
  EXPECT_THAT(
      verdict(run(70, 20), run(60, 10, 8, 1'500'000)),
      HasSubstr("50.0 % fewer bytes and its step is 10.00 ms (14.3 %) shorter: streams wait 10.00 ms"));
  // Fewer bytes, a longer step, and not because of waiting: the codec beside the compute.
  const std::string slower = verdict(run(70, 4), run(80, 3, 8, 1'500'000));
  EXPECT_THAT(slower, HasSubstr("that is not waiting for collectives"));
  EXPECT_THAT(slower, HasSubstr("went from 66.00 to 77.00 ms"));
  EXPECT_THAT(verdict(run(70, 4), run(70.2, 4, 8, 1'500'000)), HasSubstr("its step is as long"));
  RunSummary unknown = run(90, 4);
  unknown.measured = false;
  EXPECT_THAT(verdict(run(70, 4), unknown), HasSubstr("why is unknown"));
  // One sentence.
  for (const std::string& v : {slower, verdict(run(70, 4), run(92, 26, 1))})
    EXPECT_EQ(v.find(". "), std::string::npos);
}

TEST(MeterReport, JsonAndPage) {
  RunSummary s = run(20, 4);
  s.path = "<script>alert(1)</script>";
  const auto json = nlohmann::json::parse(reportJson(s));
  EXPECT_EQ(json["schema"], "halfwire.report");
  EXPECT_EQ(json["exposed_ms"], 4);
  EXPECT_EQ(json["ranks"].size(), 2u);
  EXPECT_EQ(json["ranks"][0]["per_step"].size(), 12u);
  EXPECT_TRUE(json["ranks"][0]["per_step"][3]["exposed_ms"].is_null());
  EXPECT_EQ(json["collectives"][0]["size_bucket_bytes"], 1 << 20);
  EXPECT_THAT(reportHtml(s), Not(HasSubstr("<script")));
  const auto both = nlohmann::json::parse(compareJson(run(70, 4), run(92, 26, 1)));
  EXPECT_EQ(both["a"]["step_ms"], 70);
  EXPECT_THAT(both["verdict"].get<std::string>(), HasSubstr("longer"));
}

TEST(MeterReport, ReadsAFolderAndNamesWhatItCannotRead) {
  char name[] = "/tmp/halfwire-report-test-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::string folder = name;
  EXPECT_FALSE(readRun(folder).ok());
  for (int rank = 0; rank < 2; ++rank)
    std::ofstream(folder + "/rank" + std::to_string(rank) + ".json") << runLogJson(record(rank, 20, 4));
  std::ofstream(folder + "/other.json") << "{\"format\": \"something\"}";
  const auto s = readRun(folder);
  ASSERT_TRUE(s.ok()) << s.status().message();
  EXPECT_EQ(s.value().ranks.size(), 2u);
  EXPECT_DOUBLE_EQ(s.value().exposed_ms, 4);
  EXPECT_THAT(reportText(s.value()), HasSubstr("other.json"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace halfwire::meter
