// Nsight exports made by hand, row by row, with answers known from how they were made.
#include "trace/nsys_reader.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "analysis/account.h"

namespace halfwire::analysis {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Export : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = fs::temp_directory_path() / fmt::format("halfwire-nsys-{}.sqlite", ::getpid());
    fs::remove(path_);
  }
  void TearDown() override { fs::remove(path_); }

  void sql(const std::string& statements) {
    sqlite3* raw = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &raw), SQLITE_OK);
    const std::unique_ptr<sqlite3, int (*)(sqlite3*)> db(raw, sqlite3_close);
    char* error = nullptr;
    const int code = sqlite3_exec(raw, statements.c_str(), nullptr, nullptr, &error);
    const std::string words = error == nullptr ? "" : error;
    sqlite3_free(error);
    ASSERT_EQ(code, SQLITE_OK) << words;
  }

  Result<trace::Timeline> read() {
    static const trace::CommPatterns patterns = trace::CommPatterns::create({}).value();
    return trace::readNsys(path_.string(), patterns);
  }

  fs::path path_;
};

constexpr const char* kTables = R"(
  CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
  CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, graphNodeId INTEGER);
  CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, nameId INTEGER, correlationId INTEGER,
    globalTid INTEGER);
  INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)'),
    (3, 'cudaLaunchKernel_v7000'), (4, 'cudaGraphLaunch_v10000');
)";

// The nodes of a graph share the correlation of its one launch: they are not launches of the host, and what
// is between them is no late launch.
TEST_F(Export, NodesOfAGraphAreNoHostLaunches) {
  std::string rows = kTables;
  rows += "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 5000, 4, 77, 16777217);";
  for (int i = 0; i < 8; ++i) {
    rows += fmt::format("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({}, {}, 0, 7, 77, 16777216, {}, {});",
                        10'000 + i * 2'000, 10'000 + i * 2'000 + 1'500, i == 7 ? 2 : 1, 100 + i);
  }
  sql(rows);
  const auto t = read();
  ASSERT_TRUE(t.ok()) << t.status().message();
  EXPECT_EQ(t.value().calls.size(), 1u);
  const auto lanes = accountLanes(t.value());
  ASSERT_EQ(lanes.size(), 1u);
  const Lane& lane = lanes[0];
  EXPECT_EQ(lane.graph_kernels, 8);
  EXPECT_EQ(lane.total.span, 15'500);
  EXPECT_EQ(lane.total.compute, 7 * 1'500);
  EXPECT_EQ(lane.total.exposed, 1'500);
  EXPECT_EQ(lane.total.idle, 7 * 500);
  EXPECT_EQ(lane.idle[static_cast<size_t>(IdleCause::kLaunchBound)], 0);
}

// The same kernels, each launched by itself and each launch later than the end of the kernel before.
TEST_F(Export, LaunchesThatComeLateAreTheCauseOfTheGaps) {
  std::string rows = kTables;
  for (int i = 0; i < 8; ++i) {
    const int start = 10'000 + i * 2'000;
    rows += fmt::format(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({}, {}, 3, {}, 16777217);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({}, {}, 0, 7, {}, 16777216, 1, NULL);",
        start - 100, start - 50, i + 1, start, start + 1'500, i + 1);
  }
  sql(rows);
  const auto t = read();
  ASSERT_TRUE(t.ok()) << t.status().message();
  const auto lanes = accountLanes(t.value());
  ASSERT_EQ(lanes.size(), 1u);
  EXPECT_EQ(lanes[0].graph_kernels, 0);
  EXPECT_EQ(lanes[0].total.idle, 7 * 500);
  EXPECT_EQ(lanes[0].idle[static_cast<size_t>(IdleCause::kLaunchBound)], 7 * 500);
}

TEST_F(Export, MissingColumnsAreNamed) {
  sql("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
      "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId INTEGER);");
  const auto t = read();
  ASSERT_FALSE(t.ok());
  EXPECT_THAT(t.status().message(), HasSubstr("streamId"));
}

TEST_F(Export, ATruncatedFileIsNotReadInPart) {
  std::string rows = kTables;
  for (int i = 0; i < 4000; ++i) {
    rows +=
        fmt::format("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({}, {}, 0, 7, {}, 16777216, 1, NULL);",
                    i * 10, i * 10 + 5, i + 1);
  }
  sql("BEGIN;" + rows + "COMMIT;");
  fs::resize_file(path_, fs::file_size(path_) / 2);
  const auto t = read();
  ASSERT_FALSE(t.ok());
  EXPECT_THAT(t.status().message(), HasSubstr("cannot be read"));
}

}  // namespace
}  // namespace halfwire::analysis
