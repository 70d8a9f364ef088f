// The library in front of a NCCL that only counts: what reaches the real functions, how often and in which
// order, how they are found, and what happens to programs that never use NCCL. No communicator compresses
// here (the fake has no device), so every call has to pass through.
#include "fake_nccl/fake_nccl.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "policy/run_log.h"
#include "support/launch.h"
#include "support/rank.h"

namespace halfwire::testing {
namespace {

const char* const kFunctionNames[] = {
#define FAKE_NAME(ret, name, params, args) #name,
    HALFWIRE_NCCL_FUNCTIONS(FAKE_NAME)
#undef FAKE_NAME
};

// Functions the library may call for its own information; what it opens as groups is its own affair too, as
// long as the depth is right. Everything else has to arrive exactly as often as the program called it.
const std::set<std::string> kMayCallMore = {"ncclGetVersion", "ncclGetErrorString", "ncclGetLastError",
                                            "ncclCommCount",  "ncclCommUserRank",   "ncclCommCuDevice",
                                            "ncclGroupStart", "ncclGroupEnd",       "ncclCommGetAsyncError"};

// Functions that ask or that register memory: nothing of ours depends on them, so a program may reach them
// directly.
const std::set<std::string> kNeedNotBeInterposed = {"ncclMemAlloc",           "ncclMemFree",
                                                    "ncclGetVersion",         "ncclGetErrorString",
                                                    "ncclResetDebugInit",     "ncclCommCount",
                                                    "ncclCommCuDevice",       "ncclCommUserRank",
                                                    "ncclCommGetAsyncError",  "ncclGetLastError",
                                                    "ncclCommRegister",       "ncclCommDeregister",
                                                    "ncclCommWindowRegister", "ncclCommWindowDeregister"};

std::string countsText() {
  std::ostringstream text;
  for (const char* name : kFunctionNames) {
    text << name << " " << fake_nccl_calls(name) << " " << fake_nccl_inner_calls(name) << "\n";
  }
  return text.str();
}

struct Counts {
  uint64_t outside = 0;
  uint64_t inner = 0;
};

std::map<std::string, Counts> parseCounts(const std::string& text) {
  std::map<std::string, Counts> counts;
  std::istringstream in(text);
  std::string name;
  Counts c;
  while (in >> name >> c.outside >> c.inner) counts[name] = c;
  return counts;
}

std::string recorded() {
  std::string text(1 << 16, '\0');
  text.resize(fake_nccl_recorded(text.data(), text.size()));
  return text;
}

ncclComm_t makeComm() {
  ncclUniqueId id;
  RANK_CHECK(ncclGetUniqueId(&id) == ncclSuccess);
  ncclComm_t comm = nullptr;
  RANK_CHECK(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess);
  RANK_CHECK(comm != nullptr);
  return comm;
}

// Every function of the table once, most of them successfully.
RANK_PROGRAM(EveryFunction) {
  float a[8] = {}, b[8] = {};
  int number = 0;
  void* handle = nullptr;
  ncclWindow_t window = nullptr;
  ncclResult_t error = ncclSuccess;
  ncclRedOp_t op = ncclSum;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclComm_t comm = nullptr, other = nullptr, split = nullptr, shrunk = nullptr, scalable = nullptr,
             all[2] = {};
  RANK_CHECK(ncclGetVersion(&number) == ncclSuccess && number == NCCL_VERSION_CODE);
  RANK_CHECK(ncclGetUniqueId(&id) == ncclSuccess);
  RANK_CHECK(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess);
  RANK_CHECK(ncclCommInitRankConfig(&other, 1, id, 0, &config) == ncclSuccess);
  RANK_CHECK(ncclCommInitRankScalable(&scalable, 1, 0, 1, &id, &config) == ncclSuccess);
  RANK_CHECK(ncclCommInitAll(all, 2, nullptr) == ncclSuccess);
  RANK_CHECK(ncclCommSplit(comm, 0, 0, &split, nullptr) == ncclSuccess);
  RANK_CHECK(ncclCommShrink(comm, nullptr, 0, &shrunk, nullptr, 0) == ncclSuccess);
  RANK_CHECK(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  RANK_CHECK(ncclGetLastError(comm) != nullptr);
  ncclResetDebugInit();
  RANK_CHECK(ncclCommGetAsyncError(comm, &error) == ncclSuccess);
  RANK_CHECK(ncclCommCount(comm, &number) == ncclSuccess && number == 1);
  RANK_CHECK(ncclCommUserRank(comm, &number) == ncclSuccess && number == 0);
  RANK_CHECK(ncclCommCuDevice(comm, &number) == ncclSuccess);
  RANK_CHECK(ncclMemAlloc(&handle, 16) == ncclSuccess);
  RANK_CHECK(ncclMemFree(handle) == ncclSuccess);
  RANK_CHECK(ncclCommRegister(comm, a, sizeof a, &handle) == ncclSuccess && handle == a);
  RANK_CHECK(ncclCommDeregister(comm, handle) == ncclSuccess);
  RANK_CHECK(ncclCommWindowRegister(comm, a, sizeof a, &window, 0) == ncclSuccess);
  RANK_CHECK(ncclCommWindowDeregister(comm, window) == ncclSuccess);
  RANK_CHECK(ncclRedOpCreatePreMulSum(&op, a, ncclFloat32, ncclScalarHostImmediate, comm) == ncclSuccess);
  RANK_CHECK(ncclAllReduce(a, b, 8, ncclFloat32, op, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclRedOpDestroy(op, comm) == ncclSuccess);
  RANK_CHECK(ncclReduce(a, b, 8, ncclFloat32, ncclSum, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclBcast(a, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclBroadcast(a, b, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclReduceScatter(a, b, 8, ncclFloat32, ncclSum, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclAllGather(a, b, 8, ncclFloat32, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclAlltoAll(a, b, 8, ncclFloat32, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclGather(a, b, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclScatter(a, b, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(ncclSend(a, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclRecv(b, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  ncclSimInfo_t info = {sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, 0.0f};
  RANK_CHECK(ncclGroupSimulateEnd(&info) == ncclSuccess);
  RANK_CHECK(ncclCommFinalize(comm) == ncclSuccess);
  RANK_CHECK(ncclCommRevoke(shrunk, 0) == ncclSuccess);
  RANK_CHECK(ncclCommAbort(shrunk) == ncclSuccess);
  for (ncclComm_t each : {split, scalable, all[0], all[1], other, comm})
    RANK_CHECK(ncclCommDestroy(each) == ncclSuccess);
  RANK_CHECK(fake_nccl_group_depth() == 0);
  RANK_CHECK(fake_nccl_foreign_comms() == 0);
  rank.report("counts", countsText());
}

class FakeNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }

  static LaunchOutcome launchOne(const std::string& program, bool preload, const Environment& env = {}) {
    LaunchOptions options;
    options.ranks = 1;
    options.preload = preload;
    options.env = env;
    options.timeout_s = 30;
    return launchRanks(program, options);
  }
};

Environment mode(const std::string& name) {
  return {{"HALFWIRE_MODE", name}, {"HALFWIRE_COMMS", "all"}, {"HALFWIRE_MIN_BYTES", "0"}};
}

TEST_F(FakeNccl, EveryCallArrivesExactlyOnce) {
  const LaunchOutcome bare = launchOne("EveryFunction", false);
  ASSERT_TRUE(bare.ok()) << bare.describe();
  const auto expected = parseCounts(bare.ranks[0].reports.at("counts").value);
  ASSERT_EQ(expected.size(), std::size(kFunctionNames));
  // The fake does call itself, or the comparison below would prove nothing about re-entry.
  EXPECT_EQ(expected.at("ncclBroadcast").inner, 1u);
  EXPECT_EQ(expected.at("ncclGetUniqueId").inner, 1u);
  EXPECT_EQ(expected.at("ncclCommGetAsyncError").inner, 7u);
  for (const char* name : kFunctionNames)
    EXPECT_GE(expected.at(name).outside, 1u) << name << " was not called by the program";

  for (const Environment& env : {Environment{}, mode("off"), mode("wire")}) {
    const LaunchOutcome outcome = launchOne("EveryFunction", true, env);
    ASSERT_TRUE(outcome.ok()) << outcome.describe();
    const auto counts = parseCounts(outcome.ranks[0].reports.at("counts").value);
    const std::string what = env.empty() ? "no mode" : env.at("HALFWIRE_MODE");
    for (const auto& [name, expect] : expected) {
      EXPECT_EQ(counts.at(name).inner, expect.inner) << name << ", " << what;
      if (kMayCallMore.count(name) != 0) continue;
      EXPECT_EQ(counts.at(name).outside, expect.outside) << name << ", " << what;
    }
  }
}

// Calls of a program in the order it makes them, groups among them.
RANK_PROGRAM(Sequence) {
  float a[64] = {}, b[64] = {};
  ncclComm_t comm = makeComm();
  fake_nccl_record();
  const auto reduce = [&](size_t n) {
    RANK_CHECK(ncclAllReduce(a, b, n, ncclFloat32, ncclSum, comm, nullptr) == ncclSuccess);
  };
  reduce(1);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(ncclSend(a, 2, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  reduce(3);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(ncclRecv(a, 4, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);
  RANK_CHECK(fake_nccl_group_depth() >= 1);
  reduce(5);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);
  RANK_CHECK(fake_nccl_group_depth() == 0);
  reduce(6);
  RANK_CHECK(ncclBcast(a, 7, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);
  reduce(8);
  std::istringstream in(recorded());
  std::string data;
  for (std::string word; in >> word;) {
    if (word.find(':') != std::string::npos) data += word + " ";
  }
  rank.report("order", data);
  RANK_CHECK(ncclCommDestroy(comm) == ncclSuccess);
}

TEST_F(FakeNccl, OrderOfCallsIsKept) {
  const LaunchOutcome bare = launchOne("Sequence", false);
  ASSERT_TRUE(bare.ok()) << bare.describe();
  const std::string order = bare.ranks[0].reports.at("order").value;
  ASSERT_EQ(
      order,
      "ncclAllReduce:1 ncclSend:2 ncclAllReduce:3 ncclRecv:4 ncclAllReduce:5 ncclAllReduce:6 ncclBcast:7 "
      "ncclAllReduce:8 ");
  for (const char* name : {"off", "wire"}) {
    const LaunchOutcome outcome = launchOne("Sequence", true, mode(name));
    ASSERT_TRUE(outcome.ok()) << outcome.describe();
    EXPECT_EQ(outcome.ranks[0].reports.at("order").value, order) << name;
  }
}

// Whatever goes wrong in a group, the thread's next call is not taken for a part of it.
RANK_PROGRAM(GroupDepth) {
  float a[8] = {};
  ncclComm_t comm = makeComm();
  const auto reduce = [&](ncclComm_t c) { return ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, c, nullptr); };
  const auto arrivesAtOnce = [&] {
    const uint64_t before = fake_nccl_calls("ncclAllReduce");
    return reduce(comm) == ncclSuccess && fake_nccl_calls("ncclAllReduce") == before + 1 &&
           fake_nccl_group_depth() == 0;
  };
  Rank::note("end without start");
  RANK_CHECK(ncclGroupEnd() == ncclInvalidUsage);
  RANK_CHECK(arrivesAtOnce());
  RANK_CHECK(ncclGroupEnd() == ncclInvalidUsage);

  Rank::note("simulate");
  ncclSimInfo_t info = {sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, 0.0f};
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(reduce(comm) == ncclSuccess);
  RANK_CHECK(ncclGroupSimulateEnd(&info) == ncclSuccess);
  RANK_CHECK(info.estimatedTime == 1.5f);
  RANK_CHECK(arrivesAtOnce());
  RANK_CHECK(ncclGroupEnd() == ncclInvalidUsage);

  Rank::note("simulate, nested");
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(reduce(comm) == ncclSuccess);
  RANK_CHECK(ncclGroupSimulateEnd(&info) == ncclSuccess);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);
  RANK_CHECK(arrivesAtOnce());

  Rank::note("bad argument in a group");
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  RANK_CHECK(reduce(comm) == ncclSuccess);
  RANK_CHECK(reduce(nullptr) == ncclInvalidArgument);
  RANK_CHECK(ncclGroupEnd() == ncclInvalidArgument);
  RANK_CHECK(arrivesAtOnce());

  Rank::note("NCCL refuses in a group");
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  fake_nccl_fail_with(ncclSystemError);
  const ncclResult_t in_group = reduce(comm);
  const ncclResult_t at_end = ncclGroupEnd();
  fake_nccl_fail_with(ncclSuccess);
  RANK_CHECK(in_group == ncclSystemError);
  RANK_CHECK(at_end == ncclSystemError);
  RANK_CHECK(arrivesAtOnce());

  Rank::note("another thread's group");
  RANK_CHECK(ncclGroupStart() == ncclSuccess);
  bool other_ok = false;
  std::thread([&] { other_ok = arrivesAtOnce() && ncclGroupEnd() == ncclInvalidUsage; }).join();
  RANK_CHECK(other_ok);
  RANK_CHECK(ncclGroupEnd() == ncclSuccess);

  Rank::note("a destroyed communicator's address is used again");
  for (int i = 0; i < 50; ++i) {
    ncclComm_t next = makeComm();
    RANK_CHECK(reduce(next) == ncclSuccess);
    RANK_CHECK((i % 2 == 0 ? ncclCommDestroy(next) : ncclCommAbort(next)) == ncclSuccess);
  }
  RANK_CHECK(ncclCommDestroy(comm) == ncclSuccess);
}

TEST_F(FakeNccl, GroupDepthIsRight) {
  for (const bool preload : {false, true}) {
    for (const char* name : {"off", "wire"}) {
      const LaunchOutcome outcome = launchOne("GroupDepth", preload, mode(name));
      EXPECT_TRUE(outcome.ok()) << name << (preload ? " with" : " without") << " the library\n"
                                << outcome.describe();
    }
  }
}

std::unique_ptr<RunLogFile> readOnlyRunLog(const std::string& directory) {
  std::unique_ptr<RunLogFile> log;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (log != nullptr) return nullptr;
    log = std::make_unique<RunLogFile>();
    std::ifstream in(entry.path(), std::ios::binary);
    if (!in.read(reinterpret_cast<char*>(log.get()), sizeof(RunLogFile))) return nullptr;
  }
  return log;
}

RANK_PROGRAM(Counted) {
  float a[8] = {};
  ncclComm_t comm = makeComm();
  for (int i = 0; i < 3; ++i) RANK_CHECK(ncclBcast(a, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  for (int i = 0; i < 2; ++i)
    RANK_CHECK(ncclBroadcast(a, a, 8, ncclFloat32, 0, comm, nullptr) == ncclSuccess);
  for (int i = 0; i < 4; ++i)
    RANK_CHECK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclCommDestroy(comm) == ncclSuccess);
}

TEST_F(FakeNccl, CallsInsideNcclAreNotCountedAgain) {
  for (const char* name : {"off", "wire"}) {
    const TemporaryDirectory logs;
    Environment env = mode(name);
    env["HALFWIRE_LOG_DIR"] = logs.path();
    const LaunchOutcome outcome = launchOne("Counted", true, env);
    ASSERT_TRUE(outcome.ok()) << outcome.describe();
    const auto log = readOnlyRunLog(logs.path());
    ASSERT_NE(log, nullptr) << "one process, one run log";
    ASSERT_EQ(log->communicators.load(), 1u);
    std::map<CollectiveOp, uint64_t> calls;
    for (const RunLogRow& row : log->communicator[0].rows) {
      if (row.key.load() != 0)
        calls[static_cast<CollectiveOp>((row.key.load() - 1) & 0xff)] += row.calls.load();
    }
    EXPECT_EQ(calls[CollectiveOp::kBroadcast], 5u) << name;
    EXPECT_EQ(calls[CollectiveOp::kAllReduce], 4u) << name;
    EXPECT_EQ(log->closed.load(), 1u) << name;
    EXPECT_NE(std::string(log->nccl_path).find("libnccl.so.2"), std::string::npos) << log->nccl_path;
  }
}

// --- finding the real functions
// -------------------------------------------------------------------------------------

TEST_F(FakeNccl, CallerLoadedLocallyIsReached) {
  for (const char* name : {"off", "wire"}) {
    const Environment env = mode(name);
    for (const char* flags : {"local", "global", "local-lazy"}) {
      CommandOptions options{true, env, 30, ""};
      const CommandOutcome outcome = runCommand({FAKE_LOADER, FAKE_CALLER, flags}, options);
      EXPECT_TRUE(outcome.ok()) << flags << ", " << name << "\n" << outcome.describe();
      EXPECT_EQ(outcome.output, "5 calls arrived\n") << flags;
    }
  }
}

TEST_F(FakeNccl, PythonCtypesCallerIsReached) {
  if (!runCommand({"python3", "-c", "import ctypes"}).ok()) GTEST_SKIP() << "no python3 with ctypes";
  const std::string script =
      std::string("import ctypes; print(ctypes.CDLL('") + FAKE_CALLER + "').makeFiveCalls())";
  Environment env = mode("wire");
  env["ASAN_OPTIONS"] = "detect_leaks=0";
  const CommandOutcome outcome = runCommand({"python3", "-c", script}, {true, env, 30, ""});
  EXPECT_TRUE(outcome.ok()) << outcome.describe();
  EXPECT_EQ(outcome.output, "5\n");
}

// A library that lies elsewhere and is called otherwise must not take itself for NCCL.
TEST_F(FakeNccl, CopiedElsewhereItNeverFindsItself) {
  const TemporaryDirectory folder;
  for (const char* file : {"copy.so", "libnccl-shim.so"}) {
    const std::string copy = folder.path() + "/" + file;
    std::filesystem::copy_file(libraryPath(), copy);
    for (const bool point_at_itself : {false, true}) {
      LaunchOptions options;
      options.ranks = 1;
      options.library = copy;
      options.timeout_s = 30;
      options.env = mode("wire");
      if (point_at_itself) options.env["HALFWIRE_NCCL"] = copy;
      const LaunchOutcome outcome = launchRanks("Sequence", options);
      if (!point_at_itself) {
        EXPECT_TRUE(outcome.ok()) << outcome.describe();
        continue;
      }
      // Refusing the setting and finding the right one are both fine; recursion (a signal) and hanging are
      // not.
      EXPECT_FALSE(outcome.timed_out) << outcome.describe();
      EXPECT_EQ(outcome.ranks[0].signal, 0) << outcome.describe();
    }
  }
}

TEST_F(FakeNccl, ExplicitPathIsUsed) {
  const TemporaryDirectory logs;
  Environment env = mode("wire");
  env["HALFWIRE_NCCL"] = FAKE_NCCL_PATH;
  env["HALFWIRE_LOG_DIR"] = logs.path();
  const LaunchOutcome outcome = launchOne("Counted", true, env);
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  const auto log = readOnlyRunLog(logs.path());
  ASSERT_NE(log, nullptr);
  EXPECT_STREQ(log->nccl_path, FAKE_NCCL_PATH);
}

// Two copies in one process are real. What copy B calls of its own goes to copy B, never to copy A.
RANK_PROGRAM(TwoCopies) {
  void* b = dlopen(rank.args().at(0).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (b == nullptr) RANK_FAIL(dlerror());
  const auto find = [b](const char* name) {
    void* symbol = dlsym(b, name);
    if (symbol == nullptr) RANK_FAIL(name);
    return symbol;
  };
  const auto b_calls = reinterpret_cast<decltype(&fake_nccl_calls)>(find("fake_nccl_calls"));
  const auto b_inner = reinterpret_cast<decltype(&fake_nccl_inner_calls)>(find("fake_nccl_inner_calls"));
  const auto b_foreign =
      reinterpret_cast<decltype(&fake_nccl_foreign_comms)>(find("fake_nccl_foreign_comms"));
  const auto b_id = reinterpret_cast<decltype(&ncclGetUniqueId)>(find("ncclGetUniqueId"));
  const auto b_init = reinterpret_cast<decltype(&ncclCommInitRank)>(find("ncclCommInitRank"));
  const auto b_bcast = reinterpret_cast<decltype(&ncclBcast)>(find("ncclBcast"));
  const auto b_reduce = reinterpret_cast<decltype(&ncclAllReduce)>(find("ncclAllReduce"));
  const auto b_destroy = reinterpret_cast<decltype(&ncclCommDestroy)>(find("ncclCommDestroy"));
  RANK_CHECK(reinterpret_cast<void*>(b_calls) != reinterpret_cast<void*>(&fake_nccl_calls));

  float a[8] = {};
  for (int round = 0; round < 2; ++round) {
    ncclUniqueId id;
    ncclComm_t comm_b = nullptr;
    RANK_CHECK(b_id(&id) == ncclSuccess);
    RANK_CHECK(b_init(&comm_b, 1, id, 0) == ncclSuccess);
    RANK_CHECK(b_reduce(a, a, 8, ncclFloat32, ncclSum, comm_b, nullptr) == ncclSuccess);
    Rank::note("copy B broadcasts, round", round);
    RANK_CHECK(b_bcast(a, 8, ncclFloat32, 0, comm_b, nullptr) == ncclSuccess);
    ncclComm_t comm_a = makeComm();
    RANK_CHECK(ncclBcast(a, 8, ncclFloat32, 0, comm_a, nullptr) == ncclSuccess);
    RANK_CHECK(ncclCommDestroy(comm_a) == ncclSuccess);
    RANK_CHECK(b_destroy(comm_b) == ncclSuccess);
  }
  // ncclCommGetAsyncError is not interposed: the loader binds copy B's own call of it to copy A, with or without us.
  RANK_CHECK(b_foreign() == 0 && fake_nccl_foreign_comms() == 2);
  RANK_CHECK(b_inner("ncclCommGetAsyncError") == 0);
  RANK_CHECK(b_calls("ncclAllReduce") == 2 && fake_nccl_calls("ncclAllReduce") == 0);
  RANK_CHECK(b_inner("ncclBroadcast") == 2 && fake_nccl_inner_calls("ncclBroadcast") == 2);
  RANK_CHECK(b_calls("ncclBroadcast") == 0 && fake_nccl_calls("ncclBroadcast") == 0);
}

TEST_F(FakeNccl, TwoCopiesDoNotMix) {
  const TemporaryDirectory folder;
  const std::string copy = folder.path() + "/libnccl.so.2";
  std::filesystem::copy_file(FAKE_NCCL_PATH, copy);
  for (const char* name : {"off", "wire"}) {
    LaunchOptions options;
    options.ranks = 1;
    options.timeout_s = 30;
    options.env = mode(name);
    options.args = {copy};
    const LaunchOutcome outcome = launchRanks("TwoCopies", options);
    EXPECT_TRUE(outcome.ok()) << name << "\n" << outcome.describe();
  }
}

// --- bad settings
// ---------------------------------------------------------------------------------------------------

// A preloaded library that cannot read its settings must not change what the program does; it says so
// instead.
TEST_F(FakeNccl, UnreadableSettingsDoNotCrash) {
  for (const Environment& env :
       {Environment{{"HALFWIRE_MODE", "warp"}},
        Environment{{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_BLOCK", "17"}},
        Environment{{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_LOG_DIR", "/nonexistent/folder"}}}) {
    const LaunchOutcome outcome = launchOne("Sequence", true, env);
    EXPECT_EQ(outcome.ranks[0].signal, 0) << outcome.describe();
    EXPECT_FALSE(outcome.timed_out) << outcome.describe();
  }
}

// --- children
// -------------------------------------------------------------------------------------------------------

struct ChildCase {
  const char* name;
  std::vector<std::string> argv;
};

class Children : public FakeNccl, public ::testing::WithParamInterface<ChildCase> {};

TEST_P(Children, AreUnharmed) {
  Environment env = mode("wire");
  env["ASAN_OPTIONS"] = "detect_leaks=0";
  env["WORLD_SIZE"] = "4";
  env["RANK"] = "1";
  const TemporaryDirectory logs;
  env["HALFWIRE_LOG_DIR"] = logs.path();
  const auto& argv = GetParam().argv;
  const CommandOutcome bare = runCommand(argv, {false, env, 30, ""});
  if (bare.exit_code == 127) GTEST_SKIP() << argv[0] << " is not installed";
  const CommandOutcome with = runCommand(argv, {true, env, 30, ""});
  EXPECT_FALSE(with.timed_out) << with.describe();
  EXPECT_EQ(with.exit_code, bare.exit_code) << with.describe();
  EXPECT_EQ(with.signal, bare.signal) << with.describe();
  EXPECT_EQ(with.output, bare.output);
  EXPECT_EQ(with.errors, bare.errors);
  // No communicator, no run log.
  EXPECT_TRUE(std::filesystem::is_empty(logs.path()));
}

INSTANTIATE_TEST_SUITE_P(
    Programs, Children,
    ::testing::Values(
        ChildCase{"ExitCode", {"bash", "-c", "echo out; echo err >&2; exit 3"}},
        ChildCase{"BashThreads", {"bash", "-c", "ls /proc/$$/task | wc -l; cat /proc/sys/kernel/ostype"}},
        ChildCase{"PythonThreads", {"python3", "-c", "import os; print(len(os.listdir('/proc/self/task')))"}},
        ChildCase{"PythonFork",
                  {"python3", "-c",
                   "import os,sys\npid=os.fork()\nif pid==0:\n  print('child', "
                   "len(os.listdir('/proc/self/task')),flush=True); sys.exit(5)\n"
                   "print(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))"}},
        ChildCase{"Chain",
                  {"bash", "-c",
                   "python3 -c \"import subprocess as s; print(s.run(['bash','-c','echo deep; exit "
                   "9']).returncode)\""}},
        ChildCase{"PythonPool",
                  {"python3", "-c",
                   "import multiprocessing as m\nif __name__=='__main__':\n  with "
                   "m.get_context('fork').Pool(2) as p: print(p.map(abs,[-1,-2]))"}},
        ChildCase{"Signal", {"bash", "-c", "kill -TERM $$"}}),
    [](const auto& info) { return std::string(info.param.name); });

// fork() with a communicator alive: the child runs ordinary code and leaves through exit().
RANK_PROGRAM(ForkWithCommunicator) {
  float a[8] = {};
  ncclComm_t comm = makeComm();
  RANK_CHECK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, nullptr) == ncclSuccess);
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      if (i % 2 == 0) exit(7);
      execlp("bash", "bash", "-c", "exit 7", nullptr);
      _exit(1);
    }
    int status = 0;
    RANK_CHECK(waitpid(child, &status, 0) == child);
    RANK_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
  RANK_CHECK(ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, nullptr) == ncclSuccess);
  RANK_CHECK(ncclCommDestroy(comm) == ncclSuccess);
}

TEST_F(FakeNccl, ForkWithALiveCommunicator) {
  const TemporaryDirectory logs;
  Environment env = mode("wire");
  env["HALFWIRE_LOG_DIR"] = logs.path();
  env["ASAN_OPTIONS"] = "detect_leaks=0";
  const LaunchOutcome outcome = launchOne("ForkWithCommunicator", true, env);
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  const auto log = readOnlyRunLog(logs.path());
  ASSERT_NE(log, nullptr) << "a forked child writes no log of its own";
  EXPECT_EQ(log->communicators.load(), 1u);
}

// Before a communicator exists the library has done nothing; with mode off, not even then does it start a
// thread.
RANK_PROGRAM(ThreadsMade) {
  const auto threads = [] {
    const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  RANK_CHECK(threads() == 1);
  int version = 0;
  RANK_CHECK(ncclGetVersion(&version) == ncclSuccess);
  RANK_CHECK(ncclGroupStart() == ncclSuccess && ncclGroupEnd() == ncclSuccess);
  RANK_CHECK(threads() == 1);
}

TEST_F(FakeNccl, NoThreadBeforeACommunicator) {
  for (const char* name : {"off", "wire"}) {
    const LaunchOutcome outcome = launchOne("ThreadsMade", true, mode(name));
    EXPECT_TRUE(outcome.ok()) << name << "\n" << outcome.describe();
  }
}

// --- the file itself
// ------------------------------------------------------------------------------------------------

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

TEST_F(FakeNccl, NeedsNothingButLibc) {
#if HALFWIRE_SANITIZED
  GTEST_SKIP() << "a sanitized build needs the sanitizer's runtime";
#endif
  const CommandOutcome outcome = runCommand({"readelf", "-d", "-W", libraryPath()});
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  const std::set<std::string> allowed = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2",
                                         "ld-linux-aarch64.so.1"};
  int needed = 0;
  for (const std::string& line : lines(outcome.output)) {
    if (line.find("(NEEDED)") == std::string::npos) continue;
    ++needed;
    const std::string name = line.substr(line.find('[') + 1, line.find(']') - line.find('[') - 1);
    EXPECT_EQ(allowed.count(name), 1u) << "NEEDED " << name;
  }
  EXPECT_GE(needed, 1);
}

TEST_F(FakeNccl, ExportsWhatItInterposesAndNothingElse) {
  const CommandOutcome outcome = runCommand({"nm", "-D", "--defined-only", libraryPath()});
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  std::set<std::string> exported;
  for (const std::string& line : lines(outcome.output)) exported.insert(line.substr(line.rfind(' ') + 1));
  const std::set<std::string> known(std::begin(kFunctionNames), std::end(kFunctionNames));
  for (const std::string& name : known) {
    if (kNeedNotBeInterposed.count(name) != 0) continue;
    EXPECT_EQ(exported.count(name), 1u) << name << " is not interposed";
  }
  for (const std::string& name : exported) {
    // halfwire_* is the public C interface, include/halfwire/halfwire.h.
    if (name.rfind("halfwire_", 0) == 0) continue;
    if (name == "dlopen") continue;  // for programs that take NCCL by handle, handles_test.cc
    EXPECT_EQ(known.count(name), 1u) << name << " is exported";
  }
}

TEST_F(FakeNccl, LoadsOnGlibc235) {
#if HALFWIRE_SANITIZED
  GTEST_SKIP() << "a sanitized build is not for other machines";
#endif
  const CommandOutcome outcome = runCommand({"objdump", "-T", libraryPath()});
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  int checked = 0;
  for (const std::string& line : lines(outcome.output)) {
    const size_t at = line.find("GLIBC_");
    if (at == std::string::npos) continue;
    int major = 0, minor = 0;
    if (sscanf(line.c_str() + at, "GLIBC_%d.%d", &major, &minor) != 2) continue;
    ++checked;
    EXPECT_LE(major * 1000 + minor, 2035) << line;
  }
  EXPECT_GT(checked, 10);
}

}  // namespace
}  // namespace halfwire::testing
