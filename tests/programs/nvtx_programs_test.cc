// The NVTX ranges that a profiler gets around collectives.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "programs/programs.h"

namespace halfwire::testing {
namespace {

RANK_PROGRAM(Ranges) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  Buffer in(ncclBfloat16, 1 << 20), out(ncclBfloat16, 1 << 20);
  CHECK_NCCL(ncclAllReduce(in.data(), out.data(), 1 << 20, ncclBfloat16, ncclSum, comm, stream));
  CHECK_NCCL(ncclAllReduce(in.data(), out.data(), 100, ncclBfloat16, ncclMax, comm, stream));
  CHECK_NCCL(ncclGroupStart());
  CHECK_NCCL(ncclAllReduce(in.data(), out.data(), 1 << 19, ncclBfloat16, ncclSum, comm, stream));
  CHECK_NCCL(ncclAllReduce(in.data(), out.data(), 1 << 19, ncclBfloat16, ncclSum, comm, stream));
  CHECK_NCCL(ncclGroupEnd());
  stream.synchronize();
  CHECK_NCCL(ncclCommDestroy(comm));
}

TEST(Nvtx, RangesSayOperationSizeTypeAndFormat) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  char name[] = "/tmp/halfwire-nvtx-test-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::string folder = name;
  const LaunchOutcome ran = launchWith("Ranges", 2,
                                       with(compressing(), {{"NVTX_INJECTION64_PATH", HALFWIRE_NVTX_TOOL},
                                                            {"NVTX_TOOL_OUT", folder + "/rank"}}));
  EXPECT_TRUE(ran.ok()) << ran.describe();
  std::vector<std::string> lines;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    lines.clear();
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    const std::vector<std::string> want{"0 AllReduce 2 MiB bf16 e4m3/128/fp32",
                                        "0 AllReduce 200 B bf16 exact",
                                        "0 group of 2 compressed calls, 2 MiB"};
    EXPECT_EQ(lines, want);
  }
  EXPECT_FALSE(lines.empty());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace halfwire::testing
