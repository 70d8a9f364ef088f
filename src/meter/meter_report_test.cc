// What the report makes of run logs: means, sizes, skew, notes and verdicts from figures known by
// construction.
#include "meter/meter_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

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

// The run logs of `halfwire bench step --preset ddp -n 2 --steps 40 --meter-every 2`, overlapped and merged,
// and of the same with `--link 300Mbit --schedule overlapped`, exact and with `--mode wire`.
std::string logs(const std::string& run) {
  return std::string(std::getenv("HALFWIRE_SOURCE_DIR")) + "/src/meter/testdata/runs/" + run;
}

RunSummary read(const std::string& name) {
  auto run = readRun(logs(name));
  EXPECT_TRUE(run.ok()) << run.status().message();
  return run.ok() ? std::move(run).value() : RunSummary{};
}

double medianOf(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

// Mean over the ranks of a step's and of exposed time's medians, and of the median of what the host did
// itself, by the JSON alone.
struct Oracle {
  double step = 0, exposed = 0, own = 0;
};

Oracle oracle(const std::string& name) {
  Oracle sum;
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream in(logs(name) + "/rank" + std::to_string(rank) + ".json");
    const auto json = nlohmann::json::parse(in);
    std::vector<double> step, exposed, own;
    for (const auto& s : json["meter"]["steps"]) {
      if (s["number"] < json["meter"]["warmup"]) continue;
      const double ms = s["duration_ns"].get<double>() * 1e-6;
      step.push_back(ms);
      own.push_back(std::max(0.0, ms - s["host_blocked_ns"].get<double>() * 1e-6));
      if (!s["exposed_ns"].is_null() && s["unmeasured"] == 0)
        exposed.push_back(s["exposed_ns"].get<double>() * 1e-6);
    }
    sum.step += medianOf(step) / 2;
    sum.exposed += medianOf(exposed) / 2;
    sum.own += medianOf(own) / 2;
  }
  return sum;
}

nlohmann::json embedded(const std::string& html) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t from = html.find(open) + open.size();
  return nlohmann::json::parse(html.substr(from, html.find("</script>", from) - from));
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
  // What waiting saves and compute spends again is not hidden.
  const std::string traded = verdict(run(70, 9), run(70.2, 4, 8, 1'500'000));
  EXPECT_THAT(traded, HasSubstr("of the +0.20 ms, -5.00 are waiting for collectives and +5.20 the rest"));
  EXPECT_THAT(traded, Not(HasSubstr("hidden")));
  // One sentence.
  for (const std::string& v : {slower, traded, verdict(run(70, 4), run(92, 26, 1))})
    EXPECT_EQ(v.find(". "), std::string::npos);
}

TEST(MeterReport, TheStepIsWaitingAndTheRest) {
  for (const auto& [first, second] : {std::pair("overlapped", "merged"), std::pair("exact", "compressed")}) {
    const Oracle a = oracle(first), b = oracle(second);
    const auto json = nlohmann::json::parse(compareJson(read(first), read(second)));
    const auto& d = json["difference_ms"];
    EXPECT_NEAR(d["step"].get<double>(), b.step - a.step, 1e-9);
    EXPECT_NEAR(d["exposed"].get<double>(), b.exposed - a.exposed, 1e-9);
    EXPECT_NEAR(d["rest"].get<double>(), (b.step - b.exposed) - (a.step - a.exposed), 1e-9);
    EXPECT_NEAR(d["host_own"].get<double>(), b.own - a.own, 1e-9);
    EXPECT_NEAR(json["rest_ms"][1].get<double>(), b.step - b.exposed, 1e-9);
  }
  const std::string merged = compareText(read("overlapped"), read("merged"));
  EXPECT_THAT(merged, HasSubstr("  waiting: exposed ms                    3.464      17.404     +13.940"));
  EXPECT_THAT(merged, HasSubstr("  the rest: compute, host ms            65.344      65.395      +0.051"));
  EXPECT_THAT(merged, HasSubstr("of the +13.99 ms, +13.94 are waiting for collectives and +0.05 the rest "
                                "(compute beside communication, host)."));
  EXPECT_THAT(verdict(read("exact"), read("compressed")),
              HasSubstr("of the -13.99 ms, -14.17 are waiting for collectives and +0.18 the rest"));
}

TEST(MeterReport, WhoseTheRestIsFollowsTheHostsOwnTime) {
  const auto with = [](double step_ms, double own_ms) {
    RunSummary s = run(step_ms, 4);
    s.host_own_ms = own_ms;
    return s;
  };
  EXPECT_THAT(
      verdict(with(70, 5), with(80, 5.2)),
      HasSubstr("is busy 5.20 ms outside its waits instead of 5.00 ms, so that it is the streams that "
                "compute longer"));
  EXPECT_THAT(verdict(with(70, 5), with(80, 14)), HasSubstr("instead of 5.00 ms, which may be why"));
  EXPECT_THAT(verdict(with(80, 5), with(70, 6)), HasSubstr("compute less long"));
  EXPECT_THAT(verdict(with(70, 69), with(80, 79)), HasSubstr("the logs cannot tell"));
}

TEST(MeterReport, WhatIsUnknownInOneRunIsInNeither) {
  RunSummary unknown = run(90, 4);
  unknown.measured = false;
  EXPECT_THAT(compareText(run(70, 4), unknown),
              HasSubstr("the rest: compute, host ms                 -           -\n"));
  const auto json = nlohmann::json::parse(compareJson(run(70, 4), unknown));
  EXPECT_TRUE(json["rest_ms"][0].is_null());
  EXPECT_TRUE(json["difference_ms"]["exposed"].is_null());
  EXPECT_EQ(json["difference_ms"]["step"], 20);
  EXPECT_TRUE(embedded(compareHtml(run(70, 4), unknown))["lines"][1]["a"].is_null());
}

TEST(MeterReport, CollectivesOfBothRunsStandBesideEachOther) {
  const auto json = nlohmann::json::parse(compareJson(read("overlapped"), read("merged")));
  ASSERT_EQ(json["collectives"].size(), 2u);  // eight of 256 KiB in the one, one of 2 MiB in the other
  EXPECT_EQ(json["collectives"][0]["b"]["size_bucket_bytes"], 2 << 20);
  EXPECT_TRUE(json["collectives"][0]["a"].is_null());
  EXPECT_EQ(json["collectives"][1]["a"]["size_bucket_bytes"], 256 << 10);
  EXPECT_TRUE(json["collectives"][1]["b"].is_null());
  const auto same = nlohmann::json::parse(compareJson(read("exact"), read("compressed")));
  ASSERT_EQ(same["collectives"].size(), 1u);
  EXPECT_EQ(same["collectives"][0]["a"], same["a"]["collectives"][0]);
  EXPECT_EQ(same["collectives"][0]["b"], same["b"]["collectives"][0]);
}

TEST(MeterReport, PagesHoldWhatTheJsonSays) {
  const RunSummary a = read("exact"), b = read("compressed");
  const auto both = embedded(compareHtml(a, b));
  const auto json = nlohmann::json::parse(compareJson(a, b));
  EXPECT_EQ(both["lead"], json["verdict"]);
  EXPECT_EQ(both["collectives"], json["collectives"]);
  ASSERT_EQ(both["runs"].size(), 2u);
  EXPECT_EQ(both["runs"][1]["step_ms"], json["b"]["step_ms"]);
  EXPECT_FALSE(both["runs"][1]["ranks"][0].contains("per_step"));
  EXPECT_EQ(both["lines"][2]["a"], json["rest_ms"][0]);
  EXPECT_EQ(both["notes"], nlohmann::json::array({a.notes, b.notes}));
  const auto one = embedded(reportHtml(a));
  ASSERT_EQ(one["runs"].size(), 1u);
  EXPECT_THAT(one["lead"].get<std::string>(), HasSubstr("ms a step, of which"));
  for (const char* outside : {"http:", "https:", " src=", "<link", "@import", "url(", "fetch("})
    EXPECT_THAT(compareHtml(a, b), Not(HasSubstr(outside)));
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
  for (const std::string& html : {reportHtml(s), compareHtml(s, s)}) {
    EXPECT_THAT(html, Not(HasSubstr("<script>alert")));
    EXPECT_EQ(embedded(html)["runs"][0]["path"], s.path);
  }
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
