// Recordings of real jobs against values computed independently. They lie beside the project, not in it:
// found through HALFWIRE_TRACES, or in ../shared/traces of the source tree.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "analysis/analyze.h"
#include "analysis/intervals.h"
#include "analysis/waits.h"
#include "report/json_report.h"
#include "trace/trace_file.h"

namespace halfwire::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

fs::path traces() {
  if (const char* set = std::getenv("HALFWIRE_TRACES")) return set;
  const char* source = std::getenv("HALFWIRE_SOURCE_DIR");
  return fs::path(source == nullptr ? "." : source) / "../shared/traces";
}

class RealTraces : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ifstream in(traces() / "expected.json");
    if (!in) GTEST_SKIP() << "no recordings in " << traces() << ": set HALFWIRE_TRACES";
    expected_ = json::parse(in);
  }
  static json analyze(const std::string& name) {
    const auto files = trace::expandInputs({(traces() / name).string()});
    if (!files.ok()) return {{"error", files.status().message()}};
    const auto result = analysis::analyzeFiles(files.value(), {});
    if (!result.ok()) return {{"error", result.status().message()}};
    return json::parse(analyzeJson(result.value()));
  }
  json expected_;
};

// The table was computed in doubles. Where times have more than 53 bits, each of them is off by up to 0.125
// us there, and sums over thousands of gaps drift; exact decimal arithmetic over the same file gives these
// values instead.
struct Exact {
  const char* file;
  double compute_us, copy_busy_us, idle_us;
};
constexpr Exact kExact[] = {{"hta/ns_resolution.json.gz", 468153.602, 4300.839, 7574.738}};

TEST_F(RealTraces, EveryFileEqualsTheTableWithinAMicrosecond) {
  size_t compared = 0;
  for (const json& e : expected_["files"]) {
    const std::string name = e["file"];
    SCOPED_TRACE(name);
    const json j = analyze(name);
    if (!e.contains("events")) {
      EXPECT_THAT(j.value("error", ""), HasSubstr("traceEvents"));
      continue;
    }
    ASSERT_FALSE(j.contains("error")) << j["error"];
    ASSERT_EQ(j["files"].size(), 1U);
    const json& f = j["files"][0];
    EXPECT_EQ(f["events"], e["events"]);
    if (e.contains("rank")) EXPECT_EQ(f["rank"], e["rank"]);
    EXPECT_NEAR(f["compute_us"].get<double>() + f["exposed_comm_us"].get<double>() +
                    f["copy_us"].get<double>() + f["idle_us"].get<double>(),
                f["span_us"].get<double>(), 1e-6 * std::max(1.0, f["span_us"].get<double>()));
    if (!e.contains("gpu_span_ms")) {
      EXPECT_EQ(f["span_us"], 0.0);
      continue;
    }
    const auto near = [&](const char* ours, const char* theirs) {
      EXPECT_NEAR(f[ours].get<double>(), e[theirs].get<double>() * 1000, 1.0) << ours;
    };
    near("span_us", "gpu_span_ms");
    near("comm_us", "comm_union_ms");
    near("exposed_comm_us", "exposed_vs_compute_ms");
    near("exposed_not_copying_us", "exposed_vs_compute_mem_ms");
    bool exact = false;
    for (const Exact& x : kExact) {
      if (name != x.file) continue;
      exact = true;
      EXPECT_DOUBLE_EQ(f["compute_us"].get<double>(), x.compute_us);
      EXPECT_DOUBLE_EQ(f["copy_busy_us"].get<double>(), x.copy_busy_us);
      EXPECT_DOUBLE_EQ(f["idle_us"].get<double>(), x.idle_us);
    }
    if (!exact) {
      near("compute_us", "compute_union_ms");
      near("copy_busy_us", "mem_union_ms");
      near("idle_us", "gpu_idle_ms");
    }
    double busy = 0;
    int64_t count = 0;
    for (const json& c : f["collectives"]) {
      busy += c["busy_us"].get<double>();
      count += c["count"].get<int64_t>();
    }
    EXPECT_NEAR(busy, e["comm_sum_ms"].get<double>() * 1000, 1.0);
    EXPECT_EQ(count, e["comm_kernels"]);
    ++compared;
  }
  EXPECT_EQ(compared, 43U);
}

TEST_F(RealTraces, NsightExportsEqualTheTable) {
  for (const json& e : expected_["nsys"]) {
    const std::string name = e["file"];
    SCOPED_TRACE(name);
    const json j = analyze(name);
    ASSERT_FALSE(j.contains("error")) << j["error"];
    ASSERT_EQ(j["files"].size(), e["per_device"].size());
    for (const json& f : j["files"]) {
      const json& d = e["per_device"][std::to_string(f["device"].get<int>())];
      for (const auto& [ours, theirs] : std::vector<std::pair<const char*, const char*>>{
               {"span_us", "gpu_span_ms"},
               {"compute_us", "compute_union_ms"},
               {"comm_us", "comm_union_ms"},
               {"exposed_comm_us", "exposed_vs_compute_ms"},
               {"exposed_not_copying_us", "exposed_vs_compute_mem_ms"},
               {"idle_us", "gpu_idle_ms"}}) {
        EXPECT_NEAR(f[ours].get<double>(), d[theirs].get<double>() * 1000, 0.002) << ours;
      }
    }
  }
}

TEST_F(RealTraces, GroupsEqualTheTableWithinAMicrosecond) {
  for (const auto& [name, e] : expected_["cross_rank_groups"].items()) {
    SCOPED_TRACE(name);
    const json j = analyze(name);
    ASSERT_FALSE(j.contains("error")) << j["error"];
    ASSERT_EQ(j["groups"].size(), 1U);
    const json& g = j["groups"][0];
    EXPECT_EQ(g["ranks"], e["ranks"]);
    EXPECT_EQ(g["matched_collectives"], e["aligned_from_end"]);
    EXPECT_NEAR(g["intrinsic_comm_us"].get<double>(), e["intrinsic_comm_ms"].get<double>() * 1000, 1.0);
    for (size_t r = 0; r < e["wait_ms_per_rank"].size(); ++r) {
      EXPECT_NEAR(g["wait_us"][r].get<double>(), e["wait_ms_per_rank"][r].get<double>() * 1000, 1.0)
          << "rank " << r;
    }
  }
}

// Other tools' figures for the same files, where they mean the same as ours (docs/analyze.md says where not).
TEST_F(RealTraces, PeersFiguresAgreeWhereTheyMeanTheSame) {
  size_t holistic = 0;
  size_t tracelens = 0;
  for (const json& e : expected_["files"]) {
    if (!e.contains("peers")) continue;
    const std::string name = e["file"];
    SCOPED_TRACE(name);
    const json f = analyze(name)["files"][0];
    const json& peers = e["peers"];
    if (peers.contains("tracelens_ms") && peers["tracelens_ms"].contains("idle_time")) {
      const json& t = peers["tracelens_ms"];
      EXPECT_NEAR(f["span_us"].get<double>(), t["total_time"].get<double>() * 1000, 1.0);
      EXPECT_NEAR(f["idle_us"].get<double>(), t["idle_time"].get<double>() * 1000, 1.0);
      EXPECT_NEAR(f["comm_us"].get<double>(), t["total_comm_time"].get<double>() * 1000, 1.0);
      ++tracelens;
    }
    // Holistic Trace Analysis with the last step included: the same where it kept every kernel and times are
    // whole us.
    if (!peers.contains("hta_include_last_step") || !peers.contains("hta_scope_reproduced_by_us")) continue;
    const json& hta = peers["hta_include_last_step"];
    const json& scope = peers["hta_scope_reproduced_by_us"];
    const bool whole = std::fmod(f["span_us"].get<double>(), 1.0) == 0;
    if (!whole || scope["n_all"] != scope["n_kept"] || !hta.contains("temporal")) continue;
    EXPECT_EQ(f["idle_us"], hta["temporal"][0]["idle_time(us)"]);
    EXPECT_EQ(f["compute_us"], hta["temporal"][0]["compute_time(us)"]);
    const double overlap = f["comm_us"].get<double>() - f["exposed_comm_us"].get<double>();
    if (f["comm_us"] > 0.0) {
      EXPECT_NEAR(100 * overlap / f["comm_us"].get<double>(),
                  hta["overlap"][0]["comp_comm_overlap_pctg"].get<double>(), 0.006);
    }
    ++holistic;
  }
  EXPECT_GT(holistic, 10U);
  EXPECT_GT(tracelens, 10U);
}

TEST_F(RealTraces, MegatronIsLaunchBoundOnRanks0And6) {
  const json j = analyze("megatron-tp8");
  const json& g = j["groups"][0];
  EXPECT_EQ(g["launch_bound_ranks"], json({0, 6}));
  EXPECT_EQ(g["late_rank"], 0);
  EXPECT_EQ(g["late_cause"], "launch_bound");
  EXPECT_EQ(g["late_ranks"][1]["rank"], 6);
  EXPECT_EQ(g["late_ranks"][1]["cause"], "launch_bound");
  EXPECT_THAT(g["words"].get<std::string>(), HasSubstr("compression could touch 50.1 ms"));
  for (const json& f : j["files"]) {
    EXPECT_NEAR(f["fp8"]["touchable_us"].get<double>(), 50'099, 1);
    const bool bound = f["rank"] == 0 || f["rank"] == 6;
    EXPECT_EQ(std::count(f["diagnosis"].begin(), f["diagnosis"].end(), json("launch_bound")), bound ? 1 : 0);
  }
}

TEST_F(RealTraces, TheSleepingRankIsTheStraggler) {
  const json g = analyze("torchrec-sleep")["groups"][0];
  EXPECT_EQ(g["late_rank"], 2);
  EXPECT_EQ(g["late_cause"], "launch_bound");
  EXPECT_GT(g["late_ranks"][0]["cost_us"].get<double>(), 3'000'000);
}

// Every start follows from its predecessors; what none explains stays under 2 % of the span, but where the
// recorder kept no launches at the beginning.
TEST_F(RealTraces, UnchangedReplayLandsOnTheRecording) {
  for (const json& e : expected_["files"]) {
    if (!e.contains("gpu_span_ms")) continue;
    const std::string name = e["file"];
    SCOPED_TRACE(name);
    const auto result = analysis::analyzeFiles({(traces() / name).string()}, {.critical_path = true});
    ASSERT_TRUE(result.ok());
    for (const auto& r : result.value().lanes) {
      ASSERT_TRUE(r.replay);
      EXPECT_EQ(r.replay->replayed_ns, r.replay->measured_ns);
      for (const auto& s : r.replay->steps) EXPECT_EQ(s.replayed_ns, s.measured_ns) << "step " << s.number;
      const double limit = name == "tracelens/mi300_ddp_resnet.json.gz" ? 0.03 : 0.02;
      EXPECT_LE(static_cast<double>(r.replay->unexplained_ns),
                limit * static_cast<double>(r.replay->measured_ns));
    }
  }
}

// A recording whose waits are named, taken without the names. It has no collectives: whatever a wait stood
// behind counts. Where the host launched the next kernel only after the wait was over, names show a stall and
// times alone nothing; of all other waits both say the same.
TEST_F(RealTraces, StallsWithoutNamesAgreeWithThoseNamed) {
  const auto patterns = trace::CommPatterns::create({});
  ASSERT_TRUE(patterns.ok());
  auto read = trace::readTrace((traces() / "hta/alexnet.json.gz").string(), patterns.value());
  ASSERT_TRUE(read.ok());
  trace::Timeline t = std::move(read).value();
  std::vector<uint32_t> members(t.activities.size());
  std::iota(members.begin(), members.end(), 0U);
  const auto named = analysis::resolveWaits(t, 0, members);
  for (trace::StreamWait& w : t.waits) {
    ASSERT_NE(w.source_stream, trace::kNone);
    w.source_stream = trace::kNone;
    w.record_correlation = -1;
  }
  const auto inferred = analysis::resolveWaits(t, 0, members);
  ASSERT_EQ(named.size(), 20U);
  ASSERT_EQ(inferred.size(), 20U);

  const auto held = [&](const std::vector<analysis::ResolvedWait>& waits, bool all) {
    analysis::Spans spans;
    for (size_t i = 0; i < waits.size(); ++i) {
      const analysis::ResolvedWait& w = waits[i];
      if (w.behind == trace::kNone || (!all && inferred[i].source == analysis::WaitSource::kUnknown))
        continue;
      const int64_t to = std::min(t.activities[w.behind].end_ns, t.activities[w.next].start_ns);
      if (to > w.from_ns) spans.push_back({w.from_ns, to});
    }
    return analysis::length(analysis::unionOf(std::move(spans)));
  };
  EXPECT_EQ(held(named, true), 591'000);
  EXPECT_EQ(held(named, false), 482'000);
  EXPECT_EQ(held(inferred, true), 482'000);
}

}  // namespace
}  // namespace halfwire::report
