// The program's own allocator lent to the library: it gives the scratch and gets it back, and a program whose
// allocator refuses goes on exactly.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "halfwire/halfwire.h"
#include "policy/run_log_json.h"
#include "programs/programs.h"

extern "C" int halfwire_set_allocator(void* (*)(size_t, int, void*), void (*)(void*, size_t, int, void*),
                                      void*) __attribute__((weak));
extern "C" const char* halfwire_last_error(void) __attribute__((weak));

namespace halfwire::testing {
namespace {

struct Lent {
  std::string how;
  size_t given = 0;
  size_t back = 0;
  int device = -1;
};

void* give(size_t bytes, int device, void* context) {
  auto* lent = static_cast<Lent*>(context);
  if (lent->how == "nothing") return nullptr;
  lent->given += bytes;
  lent->device = device;
  char* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
  return lent->how == "crooked" ? memory + 16 : memory;
}

void takeBack(void* pointer, size_t bytes, int, void* context) {
  auto* lent = static_cast<Lent*>(context);
  lent->back += bytes;
  std::free(static_cast<char*>(pointer) - (lent->how == "crooked" ? 16 : 0));
}

RANK_PROGRAM(OwnAllocator) {
  Lent lent;
  lent.how = rank.args().at(0);
  RANK_CHECK(halfwire_set_allocator != nullptr);
  RANK_CHECK(halfwire_set_allocator(give, nullptr, nullptr) != 0);
  RANK_CHECK(std::string(halfwire_last_error()).find("both functions") != std::string::npos);
  RANK_CHECK(halfwire_set_allocator(give, takeBack, &lent) == 0);
  const ncclComm_t comm = makeWorld(rank);
  RANK_CHECK(halfwire_set_allocator(nullptr, nullptr, nullptr) != 0);
  RANK_CHECK(std::string(halfwire_last_error()).find("before the first communicator") != std::string::npos);
  const Stream stream;
  Buffer in(ncclBfloat16, 90000), out(ncclBfloat16, 90000);
  in.fill(rank.rank() + 1);
  for (int i = 0; i < 3; ++i) CHECK_NCCL(allReduce(in, out, comm, stream));
  stream.synchronize();
  out.expect(3, "sum");
  rank.report("given", std::to_string(lent.given));
  CHECK_NCCL(ncclCommDestroy(comm));
  rank.report("back", std::to_string(lent.back));
  rank.report("device", std::to_string(lent.device));
}

class OwnAllocators : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
    char name[] = "/tmp/halfwire-allocator-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  LaunchOutcome run(const std::string& how, std::vector<RunLogRecord>* records) {
    const LaunchOutcome outcome =
        launchWith("OwnAllocator", 2, with(compressing(), {{"HALFWIRE_LOG_DIR", folder_}}), {how});
    EXPECT_TRUE(outcome.ok()) << outcome.describe();
    std::vector<std::string> problems;
    *records = readRunLogs(folder_, &problems);
    return outcome;
  }
  std::string folder_;
};

TEST_F(OwnAllocators, GiveTheScratchThatTheReportNamesAndGetItBack) {
  std::vector<RunLogRecord> records;
  const LaunchOutcome outcome = run("memory", &records);
  ASSERT_EQ(records.size(), 2u);
  for (const RunLogRecord& record : records) {
    ASSERT_EQ(record.communicators.size(), 1u);
    EXPECT_EQ(record.communicators[0].reason, Reason::kCompressed);
    for (const RankOutcome& rank : outcome.ranks) {
      EXPECT_EQ(rank.reports.at("given").value, std::to_string(record.communicators[0].scratch_bytes));
      EXPECT_EQ(rank.reports.at("back").value, rank.reports.at("given").value);
      EXPECT_NE(rank.reports.at("device").value, "-1");
    }
  }
}

TEST_F(OwnAllocators, ThatRefuseLeaveTheCommunicatorExact) {
  for (const auto& [how, words] : {std::pair{"nothing", "gave no"}, std::pair{"crooked", "aligned"}}) {
    std::vector<RunLogRecord> records;
    const LaunchOutcome outcome = run(how, &records);
    for (const RankOutcome& rank : outcome.ranks)
      EXPECT_EQ(rank.reports.at("back").value, rank.reports.at("given").value) << how;
    ASSERT_EQ(records.size(), 2u);
    for (const RunLogRecord& record : records) {
      ASSERT_EQ(record.communicators.size(), 1u);
      EXPECT_EQ(record.communicators[0].reason, Reason::kMemberNotReady) << how;
      EXPECT_NE(record.communicators[0].note.find(words), std::string::npos) << record.communicators[0].note;
    }
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
}

// PyTorch's side, with a stand-in for torch: what python/halfwire/memory.py lends is what the library takes.
TEST_F(OwnAllocators, FromPython) {
  const std::string script = std::string(R"(
import ctypes, sys, types
sys.path.insert(0, ')") + HALFWIRE_PYTHON +
                             R"(')
torch = types.ModuleType('torch')
class device:
    def __init__(self, number): pass
    def __enter__(self): pass
    def __exit__(self, *_): pass
asked = []
torch.cuda = types.SimpleNamespace(device=device, caching_allocator_alloc=lambda size, number: asked.append((size, number)) or 4096,
                                   caching_allocator_delete=lambda pointer: asked.append(pointer))
sys.modules['torch'] = torch
import halfwire.memory
taken = {}
class Library:
    def __init__(self): self.halfwire_set_allocator = self
    def __call__(self, allocate, release, context):
        taken['pointer'] = allocate(300, 2, None)
        release(taken['pointer'], 300, 2, None)
        return 0
assert halfwire.memory.use_torch(Library()) is True
assert asked == [(300, 2), 4096], asked
assert halfwire.memory.use_torch(types.SimpleNamespace()) is False
)";
  const std::string with_library = script + R"(
assert halfwire.memory.use_torch() is True
print('lent')
)";
  if (!runCommand({"python3", "-c", "import ctypes"}).ok()) GTEST_SKIP() << "no python3 with ctypes";
  const CommandOutcome outcome =
      runCommand({"python3", "-c", with_library},
                 {true, {{"HALFWIRE_MODE", "wire"}, {"ASAN_OPTIONS", "detect_leaks=0"}}, 30, ""});
  EXPECT_TRUE(outcome.ok()) << outcome.describe();
  EXPECT_EQ(outcome.output, "lent\n");
}

}  // namespace
}  // namespace halfwire::testing
