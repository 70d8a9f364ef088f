// `halfwire analyze` as a program: memory that does not follow the size of the file, and what packing costs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/command_test.h"

namespace halfwire {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Analyze : public CommandTest {
 protected:
  Analyze() : CommandTest("analyze") {}

  // Steps of eight kernels, of which two are collectives of 4 MiB that nothing hides, with the operators and
  // arguments that recordings carry.
  fs::path trace(int steps) {
    const fs::path path = root_ / fmt::format("trace-{}.json", steps);
    std::FILE* file = std::fopen(path.c_str(), "w");
    fmt::print(file, R"({{"schemaVersion": 1, "distributedInfo": {{"rank": 0, "world_size": 8}}, "traceEvents": [)");
    int correlation = 0;
    for (int step = 0; step < steps; ++step) {
      for (int k = 0; k < 8; ++k) {
        const double at = 1e9 + step * 1000.0 + k * 110.0;
        const bool comm = k % 4 == 3;
        ++correlation;
        for (int op = 0; op < 6; ++op) {
          fmt::print(file,
                     R"({}{{"ph": "X", "cat": "cpu_op", "name": "aten::operator_{}", "pid": 9, "tid": 9, "ts": {:.3f},
 "dur": 9.5, "args": {{"External id": {}, "Input Dims": [[64, 1024], [1024, 1024]], "Input type": ["float", "float"]}}}})",
                     correlation == 1 && op == 0 ? "" : ",\n", op, at - 60 + op, correlation * 8 + op);
        }
        fmt::print(file,
                   R"(,
{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": {:.3f}, "dur": 4, "args": {{"correlation": {}}}}},
{{"ph": "X", "cat": "kernel", "name": "{}", "pid": 0, "tid": {}, "ts": {:.3f}, "dur": 100, "args": {{"device": 0, "stream": {}, "correlation": {}, "grid": [128, 1, 1], "block": [256, 1, 1]{}}}}})",
                   at - 50, correlation, comm ? "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)" : "gemm",
                   comm ? 20 : 7, at, comm ? 20 : 7, correlation,
                   comm ? R"(, "Collective name": "allreduce", "In msg nelems": 2097152, "dtype": "BFloat16", "Group size": 8)"
                        : "");
      }
    }
    fmt::print(file, "\n]}}\n");
    std::fclose(file);
    return path;
  }

};

// A tool that holds the whole document needs several times its size; what is kept here is a few words for a
// kernel.
TEST_F(Analyze, MemoryStaysFarBelowTheFile) {
  std::vector<Ran> ran;
  std::vector<uint64_t> sizes;
  for (const int steps : {1'500, 15'000}) {
    const fs::path path = trace(steps);
    sizes.push_back(fs::file_size(path));
    ran.push_back(halfwire({"--json", path}));
    ASSERT_EQ(ran.back().code, 0) << ran.back().err;
    const auto json = nlohmann::json::parse(ran.back().out);
    EXPECT_EQ(json["files"][0]["comm_us"], 200.0 * steps);
    EXPECT_EQ(json["files"][0]["exposed_comm_us"], 200.0 * steps);
  }
  ASSERT_GT(sizes[1], 150u << 20);
#ifndef HALFWIRE_SANITIZED
  EXPECT_LT(ran[1].peak_bytes, sizes[1] * 3 / 10);
  EXPECT_LT(ran[1].peak_bytes - ran[0].peak_bytes, (sizes[1] - sizes[0]) / 5);
#endif
}

TEST_F(Analyze, PackingAtItsMeasuredCostIsTakenOff) {
  const fs::path path = trace(50);
  const fs::path bench = root_ / "bench.json";
  nlohmann::json rows;
  for (const char* op : {"quantize", "dequantize", "reduce"}) {
    // 1 Mi elements: 2 MiB of bf16; rates chosen so that each costs 1 us a MiB of user data.
    const double mib = std::string(op) == "reduce" ? 16 : 2;
    rows.push_back({{"device", "test"}, {"op", op}, {"path", "hardware"}, {"input", "bf16"}, {"format", "e4m3"},
                    {"block", 128}, {"scale", "fp32"}, {"elements", 1 << 20}, {"working_set_bytes", 3e6},
                    {"bytes_per_s", 3e6 / (mib * 1e-6)}});
    rows.push_back(rows.back());
    rows.back()["working_set_bytes"] = 1e6;  // smaller: does not count
    rows.back()["bytes_per_s"] = 1.0;
  }
  std::ofstream(bench) << nlohmann::json({{"rows", rows}}).dump();
  const auto plain = nlohmann::json::parse(halfwire({"--json", path}).out)["files"][0]["fp8"];
  const Ran with = halfwire({"--json", "--bench", bench, path});
  ASSERT_EQ(with.code, 0) << with.err;
  const auto fp8 = nlohmann::json::parse(with.out)["files"][0]["fp8"];
  // 100 collectives of 4 MiB at 3 us a MiB.
  EXPECT_NEAR(fp8["codec_us"].get<double>(), 1200, 1);
  EXPECT_NEAR(plain["at_most_us"].get<double>() - fp8["at_most_us"].get<double>(), 1200, 1);
  EXPECT_EQ(plain["codec_us"], 0.0);
}

TEST_F(Analyze, ABenchFileThatIsNoneIsRefusedByName) {
  const fs::path path = trace(2);
  for (const char* text : {"", "[]", "{\"rows\": 3}", "{\"rows\": [3, {\"op\": \"quantize\", \"elements\": -1}]}"}) {
    std::ofstream(root_ / "bench.json") << text;
    const Ran r = halfwire({"--bench", root_ / "bench.json", path});
    EXPECT_EQ(r.code, 2) << text;
    EXPECT_THAT(r.err, HasSubstr("--bench")) << text;
    EXPECT_THAT(r.err, HasSubstr("halfwire bench codec --json")) << text;
  }
  EXPECT_EQ(halfwire({"--bench", root_ / "none.json", path}).code, 2);
}

}  // namespace
}  // namespace halfwire
