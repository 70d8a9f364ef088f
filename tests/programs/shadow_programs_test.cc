// The shadow on running programs: results are those of a run without the library, and the time it measures of
// the compressed runs is about what the wire then takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "policy/run_log_json.h"
#include "programs/programs.h"

namespace halfwire::testing {
namespace {

constexpr uint64_t kCount = 4 << 20;  // elements of bf16

// AllReduces one at a time on an emulated link; reports the median time in ms and a hash of the last result.
RANK_PROGRAM(TimedAllReduces) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, kCount), out(ncclBfloat16, kCount);
  for (uint64_t i = 0; i < kCount; ++i)
    reinterpret_cast<uint16_t*>(in.data())[i] =
        static_cast<uint16_t>(0x3c00 + (i * 2654435761u >> 20) % 0x400 + rank.rank());
  cudaEvent_t begin = nullptr, end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < std::stoi(rank.args().at(0)); ++i) {
    rank.barrier();
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_NCCL(ncclAllReduce(in.data(), out.data(), kCount, ncclBfloat16, ncclSum, comm, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    stream.synchronize();
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
    // The shadow runs behind the call; the next one begins on a quiet link.
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  std::sort(times.begin(), times.end());
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < out.bytes(); ++i)
    hash = (hash ^ static_cast<const unsigned char*>(out.data())[i]) * 0x100000001b3ull;
  rank.report("ms", std::to_string(times[times.size() / 2]));
  rank.report("hash", std::to_string(hash));
  CHECK_NCCL(ncclCommDestroy(comm));
}

double slowest(const LaunchOutcome& outcome) {
  double most = 0;
  for (const RankOutcome& r : outcome.ranks) most = std::max(most, std::stod(r.reports.at("ms").value));
  return most;
}

class Shadows : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
    char name[] = "/tmp/halfwire-shadow-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::string folder_;
};

TEST_F(Shadows, ResultsAreExactAndTimesAreThoseOfTheWire) {
  const int ranks = 2;
  const Environment link = with(compressing(), {{"HALFWIRE_HOST_LINK", "1Gbit"}});
  std::vector<double> ratios;
  for (int turn = 0; turn < 3; ++turn) {
    const std::string logs = folder_ + "/" + std::to_string(turn);
    std::filesystem::create_directory(logs);
    const LaunchOutcome wire = launchWith("TimedAllReduces", ranks, link, {"9"});
    const LaunchOutcome shadow = launchWith(
        "TimedAllReduces", ranks,
        with(link, {{"HALFWIRE_MODE", "shadow"}, {"HALFWIRE_SHADOW_EVERY", "1"}, {"HALFWIRE_LOG_DIR", logs}}),
        {"9"});
    ASSERT_TRUE(wire.ok()) << wire.describe();
    ASSERT_TRUE(shadow.ok()) << shadow.describe();
    if (turn == 0) {
      const LaunchOutcome bare = launchWith("TimedAllReduces", ranks, {}, {"1"}, false);
      ASSERT_TRUE(bare.ok()) << bare.describe();
      EXPECT_EQ(shadow.ranks[0].reports.at("hash").value, bare.ranks[0].reports.at("hash").value);
      EXPECT_NE(wire.ranks[0].reports.at("hash").value, bare.ranks[0].reports.at("hash").value);
    }
    std::vector<std::string> problems;
    double predicted = 0;
    for (const RunLogRecord& record : readRunLogs(logs, &problems)) {
      for (const RunLogComm& comm : record.communicators) {
        for (const RunLogShadowed& s : comm.shadows) {
          EXPECT_EQ(s.samples, 9u);
          predicted = std::max(predicted, s.compressed_us / 1e3);
        }
      }
    }
    ASSERT_GT(predicted, 0);
    ratios.push_back(predicted / slowest(wire));
    printf("predicted %.2f ms, the wire took %.2f ms: %.3f\n", predicted, slowest(wire), ratios.back());
  }
  std::sort(ratios.begin(), ratios.end());
  // Wide, since this machine's processors may be busy with other tests.
  EXPECT_GT(ratios[1], 0.7);
  EXPECT_LT(ratios[1], 1.4);
}

}  // namespace
}  // namespace halfwire::testing
