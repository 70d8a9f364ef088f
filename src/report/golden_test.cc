// Small hand-made traces, one for each report of a tool going wrong on such input, with the text and the
// facts expected. With HALFWIRE_UPDATE_GOLDEN=1 the texts are written anew, to be read before they are
// committed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "analysis/analyze.h"
#include "report/json_report.h"
#include "report/text_report.h"
#include "trace/trace_file.h"

namespace halfwire::report {
namespace {

namespace fs = std::filesystem;

fs::path folder() {
  const char* source = std::getenv("HALFWIRE_SOURCE_DIR");
  return fs::path(source == nullptr ? "." : source) / "src/report/testdata";
}

Result<analysis::Analysis> analyze(const std::string& name, analysis::AnalyzeOptions options = {}) {
  // Relative names, so that the texts do not depend on where the tree lies.
  const fs::path before = fs::current_path();
  fs::current_path(folder());
  const auto files = trace::expandInputs({name});
  auto result = files.ok() ? analysis::analyzeFiles(files.value(), options)
                           : Result<analysis::Analysis>(files.status());
  fs::current_path(before);
  return result;
}

nlohmann::json json(const std::string& name) {
  const auto result = analyze(name);
  if (!result.ok()) return {{"error", result.status().message()}};
  return nlohmann::json::parse(analyzeJson(result.value()));
}

// The name of an input without its endings.
std::string baseOf(const std::string& input) {
  const fs::path name(input);
  return name.extension() == ".gz" ? name.stem().stem().string() : name.stem().string();
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, TextIsAsCommitted) {
  const auto result = analyze(GetParam());
  const std::string text = result.ok() ? analyzeText(result.value(), 8) : result.status().message() + "\n";
  const fs::path file = folder() / (baseOf(GetParam()) + ".txt");
  if (std::getenv("HALFWIRE_UPDATE_GOLDEN") != nullptr) std::ofstream(file, std::ios::binary) << text;
  std::ifstream in(file, std::ios::binary);
  std::stringstream expected;
  expected << in.rdbuf();
  EXPECT_EQ(text, expected.str()) << "against " << file;
}

std::vector<std::string> inputs() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder(), none)) {
    const fs::path extension = entry.path().extension();
    if (entry.is_directory() || extension == ".json" || extension == ".gz")
      names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Reports, Golden, ::testing::ValuesIn(inputs()),
                         [](const auto& info) { return baseOf(info.param); });

// What each report is about, as numbers known from how the input was made.
struct Fact {
  const char* input;
  const char* pointer;
  nlohmann::json value;
};

TEST(Reports, FactsHold) {
  const std::vector<Fact> facts = {
      {"r01_nccl_dev_kernel.json", "/files/0/comm_us", 150.0},
      {"r01_nccl_dev_kernel.json", "/files/0/exposed_comm_us", 100.0},
      {"r02_no_comm_kernels.json", "/files/0/comm_us", 0.0},
      {"r02_no_comm_kernels.json", "/files/0/exposed_comm_us", 0.0},
      {"r03_sync_is_not_compute.json", "/files/0/compute_us", 100.0},
      {"r03_sync_is_not_compute.json", "/files/0/exposed_comm_us", 200.0},
      {"r05_graph_launch.json", "/files/0/compute_us", 108.0},
      {"r05_graph_launch.json", "/files/0/comm_us", 40.0},
      {"r05_graph_launch.json", "/files/0/idle_split/host_late_us", 0.0},
      {"r07_large_integer.json", "/files/0/collectives/0/bytes", 2097152},
      {"r08_no_distributed_info.json", "/files/0/rank", nullptr},
      {"r08_no_distributed_info.json", "/files/0/exposed_comm_us", 50.0},
      {"r09_time_zero_kernel.json", "/files/0/span_us", 150.0},
      {"r10_overlap_on_one_stream.json", "/files/0/compute_us", 150.0},
      {"r11_kernel_before_its_launch.json", "/files/0/idle_us", 30.0},
      {"r12_base_time", "/groups/0/intrinsic_comm_us", 100.0},
      {"r12_base_time", "/groups/0/wait_us/0", 300.0},
      {"r12_base_time", "/groups/0/late_rank", 1},
      {"r12_base_time", "/groups/0/late_cause", "compute"},
      {"r13_display_unit_ns.json", "/files/0/span_us", 150.0},
      {"r14_missing_group_metadata.json", "/files/0/comm_us", 100.0},
      {"r15_invalid_utf8.json", "/files/0/compute_us", 100.0},
      {"r16_bad_escapes_and_quotes.json", "/files/0/compute_us", 120.0},
      {"r16_bad_escapes_and_quotes.json", "/files/0/exposed_comm_us", 55.0},
      {"r17_launch_times_overlap.json", "/files/0/collectives/0/busy_us", 100.0},
      {"r17_launch_times_overlap.json", "/files/0/exposed_comm_us", 100.0},
      {"r19_stream_on_three_devices.json", "/files/2/device", 3},
      {"r19_stream_on_three_devices.json", "/files/1/span_us", 150.0},
      {"r19_stream_on_three_devices.json", "/files/1/compute_us", 100.0},
      {"r21_forty_percent_hidden.json", "/files/0/exposed_comm_us", 60.0},
      {"r23_external_ids_differ", "/groups/0/matched_collectives", 1},
      {"r23_external_ids_differ", "/groups/0/wait_us/0", 100.0},
      {"r24_first_kernels_missing.json", "/files/0/span_us", 150.0},
      {"r25_impossible_duration.json", "/files/0/span_us", 2150.0},
      {"r26_missing_collective", "/groups/0/matched_collectives", 2},
      {"r26_missing_collective", "/groups/0/intrinsic_comm_us", 230.0},
      {"r27_bare_words.json", "/files/0/exposed_comm_us", 50.0},
      {"r28_graph_on_forty_streams.json", "/files/0/compute_us", 400.0},
      {"r28_graph_on_forty_streams.json", "/files/0/idle_us", 0.0},
      {"r29_equal_ids.json", "/files/0/steps/0/span_us", 30000.0},
      {"r29_equal_ids.json", "/files/0/steps/1/span_us", 25000.0},
      {"r30_group_local_ranks", "/groups/0/ranks", {2, 3}},
      {"r30_group_local_ranks", "/groups/0/late_rank", 3},
      {"r31_operators_without_kernels.json", "/files/0/comm_us", 0.0},
      {"x1_codec_and_concurrent.json", "/files/0/codec_us", 30.0},
      {"x1_codec_and_concurrent.json", "/files/0/exposed_codec_us", 20.0},
      {"x1_codec_and_concurrent.json", "/files/0/exposed_comm_us", 140.0},
      {"x1_codec_and_concurrent.json", "/files/0/collectives/0/exposed_us", 90.0},
      {"x1_codec_and_concurrent.json", "/files/0/collectives/1/exposed_us", 30.0},
      {"x2_recorded_wait.json", "/files/0/stalled_us", 25.0},
      {"x2_recorded_wait.json", "/files/0/stalled_from", "recorded"},
      {"x3_unnamed_wait.json", "/files/0/stalled_us", 80.0},
      {"x3_unnamed_wait.json", "/files/0/stalled_from", "inferred"},
      {"x3_unnamed_wait.json", "/files/0/event_waits", 3},
      {"x3_unnamed_wait.json", "/files/0/event_waits_unknown", 1},
      {"x4_wait_of_which_nothing_is_known.json", "/files/0/stalled_us", nullptr},
      {"x4_wait_of_which_nothing_is_known.json", "/files/0/stalled_from", nullptr},
      // One step of a real job (FSDP2, PyTorch 2.11, four processes on one device), computed independently.
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/stalled_us", 42075.158},
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/steps/0/stalled_us", 42075.158},
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/steps/0/stalled_at_most_us", 42075.158},
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/stalled_from", "inferred"},
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/event_waits", 123},
      {"x5_fsdp2_step_unnamed_waits.json.gz", "/files/0/event_waits_unknown", 7},
      {"r01_nccl_dev_kernel.json", "/files/0/stalled_us", nullptr},
      {"r01_nccl_dev_kernel.json", "/files/0/stalled_from", nullptr},
  };
  for (const Fact& f : facts) {
    const nlohmann::json j = json(f.input);
    const nlohmann::json::json_pointer pointer(f.pointer);
    ASSERT_TRUE(j.contains(pointer)) << f.input << ' ' << f.pointer << '\n' << j.dump(1);
    EXPECT_EQ(j.at(pointer), f.value) << f.input << ' ' << f.pointer;
  }
}

TEST(Reports, WordsSayWhatIsMissing) {
  using ::testing::HasSubstr;
  EXPECT_THAT(json("r02_no_comm_kernels.json")["files"][0]["headline"].get<std::string>(),
              HasSubstr("no device communication recorded"));
  EXPECT_THAT(json("r31_operators_without_kernels.json")["files"][0]["headline"].get<std::string>(),
              HasSubstr("no device activity is recorded"));
  EXPECT_THAT(json("r24_first_kernels_missing.json")["files"][0]["warnings"][0].get<std::string>(),
              HasSubstr("first 3 kernel"));
  EXPECT_THAT(json("r26_inspector.json")["error"].get<std::string>(), HasSubstr("JSON lines"));
}

TEST(Reports, SameStreamOrderHoldsInReplay) {
  analysis::AnalyzeOptions options;
  options.what_if_comm = 0.5;
  const auto result = analyze("r18_same_stream_order.json", options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().lanes[0].replay->what_if_ns,
            195'000);  // the kernel behind the collective moves up by half of 50
}

TEST(Reports, PartsAddUpInEveryInput) {
  for (const std::string& name : inputs()) {
    const auto result = analyze(name);
    if (!result.ok()) continue;
    for (const auto& r : result.value().lanes) {
      const auto& p = r.lane.total;
      EXPECT_EQ(p.compute + p.exposed + p.copy_alone + p.idle, p.span) << name;
      int64_t exposed = p.exposed_codec;
      for (const auto& row : r.collectives) exposed += row.exposed_ns;
      EXPECT_EQ(exposed, p.exposed) << name;
    }
  }
}

}  // namespace
}  // namespace halfwire::report
