// NCCL taken by an explicit handle, which no preloaded function sees: the facade that the library's dlopen
// answers with. The same programs without the library say what dlopen has to do in every other respect.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "policy/run_log.h"
#include "support/launch.h"

namespace halfwire::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Names that programs use.
const std::string kBareName = "libnccl.so.2";

std::string folderOf(const std::string& path) { return std::filesystem::path(path).parent_path(); }

std::vector<std::unique_ptr<RunLogFile>> readLogs(const std::string& directory) {
  std::vector<std::unique_ptr<RunLogFile>> logs;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    logs.push_back(std::make_unique<RunLogFile>());
    std::ifstream in(entry.path(), std::ios::binary);
    EXPECT_TRUE(in.read(reinterpret_cast<char*>(logs.back().get()), sizeof(RunLogFile)));
  }
  return logs;
}

uint64_t callsIn(const RunLogFile& log) {
  uint64_t calls = 0;
  for (const RunLogCommunicator& communicator : log.communicator) {
    for (const RunLogRow& row : communicator.rows) calls += row.calls.load();
  }
  return calls;
}

struct Seen {
  CommandOutcome outcome;
  uint64_t calls = 0;  // that the library counted, in all processes
  std::string note;    // what the logs hold as errors
  size_t logs = 0;
};

class Handles : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  }

  static Environment environment() {
    return {{"HALFWIRE_MODE", "wire"},
            {"HALFWIRE_COMMS", "all"},
            {"HALFWIRE_MIN_BYTES", "0"},
            {"LD_LIBRARY_PATH", folderOf(FAKE_NCCL_PATH)},
            {"ASAN_OPTIONS", "detect_leaks=0"}};
  }

  static Seen run(const std::vector<std::string>& argv, bool preload, const Environment& more = {},
                  const std::string& library = "") {
    const TemporaryDirectory logs;
    CommandOptions options{preload, environment(), 60, library};
    options.env["HALFWIRE_LOG_DIR"] = logs.path();
    for (const auto& [name, value] : more) options.env[name] = value;
    Seen seen;
    seen.outcome = runCommand(argv, options);
    for (const auto& log : readLogs(logs.path())) {
      seen.calls += callsIn(*log);
      seen.note += log->error;
      EXPECT_EQ(log->closed.load(), 1u);
      ++seen.logs;
    }
    return seen;
  }

  static std::string copyOfNccl(const TemporaryDirectory& folder) {
    const std::string copy = folder.path() + "/libnccl.so.2";
    std::filesystem::copy_file(FAKE_NCCL_PATH, copy);
    return copy;
  }

  // The program prints the same with and without the library, which counts so many calls and has nothing to
  // note.
  static void expectReached(const std::vector<std::string>& argv, uint64_t calls,
                            const Environment& more = {}) {
    const Seen bare = run(argv, false, more);
    ASSERT_TRUE(bare.outcome.ok()) << bare.outcome.describe();
    const Seen with = run(argv, true, more);
    EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
    EXPECT_EQ(with.outcome.output, bare.outcome.output);
    EXPECT_EQ(with.outcome.errors, bare.outcome.errors);
    EXPECT_EQ(with.calls, calls);
    EXPECT_EQ(with.note, "");
  }
};

TEST_F(Handles, ByBareNameAndByPath) {
  for (const std::string& file : {kBareName, std::string("libnccl.so"), std::string(FAKE_NCCL_PATH)}) {
    SCOPED_TRACE(file);
    expectReached({BY_HANDLE, "calls", file}, 5);
    expectReached({BY_HANDLE, "calls", "global", file}, 5);
    expectReached({BY_HANDLE, "calls", file, FAKE_NCCL_PATH, kBareName}, 15);
  }
  EXPECT_EQ(run({BY_HANDLE, "calls", kBareName}, true).outcome.output, "5 calls\n");
}

TEST_F(Handles, FromPythonCtypes) {
  if (!runCommand({"python3", "-c", "import ctypes"}).ok()) GTEST_SKIP() << "no python3 with ctypes";
  const std::string script = R"(import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1])
P, Z, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_byte * 128)]
nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(P), I, Id, I]
nccl.ncclAllReduce.argtypes = [P, P, Z, I, I, P, P]
nccl.ncclCommDestroy.argtypes = [P]
nccl.fake_nccl_calls.restype = ctypes.c_uint64
identity, comm, a = Id(), P(), (ctypes.c_float * 8)()
assert nccl.ncclGetUniqueId(ctypes.byref(identity)) == 0
assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, identity, 0) == 0
for _ in range(5): assert nccl.ncclAllReduce(a, a, 8, 7, 0, comm, None) == 0
assert nccl.ncclCommDestroy(comm) == 0
print(nccl.fake_nccl_calls(b"ncclAllReduce"), hasattr(nccl, "ncclNoSuchFunction")))";
  for (const std::string& file : {kBareName, std::string(FAKE_NCCL_PATH)}) {
    SCOPED_TRACE(file);
    // The sanitizers' runtime has to be in python3, too, for the fake to load.
    const Seen with = run({"python3", "-c", script, file}, true);
    EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
    EXPECT_EQ(with.outcome.output, "5 False\n");
    EXPECT_EQ(with.calls, 5u);
    EXPECT_EQ(with.note, "");
  }
}

TEST_F(Handles, OpenedAndClosedAsWithoutUs) {
  for (const std::string& file : {kBareName, std::string(FAKE_NCCL_PATH)}) {
    SCOPED_TRACE(file);
    expectReached({BY_HANDLE, "lifecycle", file}, 5);
  }
  EXPECT_THAT(run({BY_HANDLE, "lifecycle", kBareName}, true).outcome.output,
              HasSubstr("before: 0\nopened: 1\nagain: 1 1\nclose: 0\nclose: 0\nclose: 0\nafter: 0\n"
                        "local: 0\nglobal: 1 1\n"));
}

TEST_F(Handles, FromAThreadAChildAndAConstructor) {
  expectReached({BY_HANDLE, "thread", kBareName}, 5);
  expectReached({BY_HANDLE, "fork", kBareName}, 10);
  expectReached({BY_HANDLE, "calls", kBareName}, 10, {{"BY_HANDLE_EARLY", FAKE_NCCL_PATH}});
  expectReached({BY_HANDLE, "through", RUNPATH_CALLER, kBareName}, 5,
                {{"HANDLE_CALLER_EARLY", FAKE_NCCL_PATH}});
}

// Two copies in one process: the one for which the library stands is followed, the other left alone,
// whichever is opened how often. Each copy sees its own five calls and no communicator of the other.
TEST_F(Handles, AnotherCopyIsLeftAloneAndNoted) {
  const TemporaryDirectory folder;
  const std::string copy = copyOfNccl(folder);
  const std::vector<std::string> argv = {BY_HANDLE, "calls", kBareName, copy, kBareName, copy};
  const Seen bare = run(argv, false);
  ASSERT_TRUE(bare.outcome.ok()) << bare.outcome.describe();
  ASSERT_EQ(bare.outcome.output, "5 calls\n5 calls\n5 calls\n5 calls\n");
  const Seen with = run(argv, true);
  EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
  EXPECT_EQ(with.outcome.output, bare.outcome.output);
  EXPECT_EQ(with.calls, 10u);
  EXPECT_EQ(with.logs, 1u);
  EXPECT_THAT(with.note, HasSubstr(copy));
  EXPECT_THAT(with.note, HasSubstr("another copy"));
}

// A program that is linked with one copy and opens another: only the calls of the first are ours.
TEST_F(Handles, ACopyBesideTheLinkedOneIsLeftAlone) {
  const TemporaryDirectory folder;
  const std::string copy = copyOfNccl(folder);
  const Environment linked = {{"LD_LIBRARY_PATH", ""}};
  const Seen with = run({LINKED_BY_HANDLE, "calls", FAKE_NCCL_PATH, copy}, true, linked);
  EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
  EXPECT_EQ(with.outcome.output, "5 calls\n5 calls\n");
  EXPECT_EQ(with.calls, 5u);
  EXPECT_THAT(with.note, HasSubstr(copy));
}

// A handle was given out, and then NCCL's functions turn out to be another copy's: said, and never mixed.
TEST_F(Handles, ACopyThatComesLateIsRefused) {
  const TemporaryDirectory folder;
  const std::string copy = copyOfNccl(folder);
  const Seen with = run({BY_HANDLE, "late", kBareName, copy}, true);
  EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
  EXPECT_EQ(with.outcome.output, "-2 calls\n");
  EXPECT_THAT(with.note, HasSubstr("two copies of NCCL"));
  EXPECT_THAT(with.note, HasSubstr("HALFWIRE_HANDLES=off"));
}

// HALFWIRE_NCCL sends every call to one library; what the program opens must be that one.
TEST_F(Handles, ACopyBesideTheChosenOneIsLeftAlone) {
  const TemporaryDirectory folder;
  const std::string copy = copyOfNccl(folder);
  const Seen with = run({BY_HANDLE, "calls", kBareName}, true, {{"HALFWIRE_NCCL", copy}});
  EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
  EXPECT_EQ(with.outcome.output, "5 calls\n");
  EXPECT_EQ(with.calls, 0u);
  EXPECT_THAT(with.note, HasSubstr("HALFWIRE_NCCL"));
  expectReached({BY_HANDLE, "calls", kBareName}, 5, {{"HALFWIRE_NCCL", FAKE_NCCL_PATH}});
}

TEST_F(Handles, OffPassesBy) {
  const Seen with = run({BY_HANDLE, "calls", kBareName}, true, {{"HALFWIRE_HANDLES", "off"}});
  EXPECT_TRUE(with.outcome.ok()) << with.outcome.describe();
  EXPECT_EQ(with.outcome.output, "5 calls\n");
  EXPECT_EQ(with.logs, 0u);
  expectReached({BY_HANDLE, "calls", kBareName}, 5, {{"HALFWIRE_HANDLES", "on"}});
  // Refused where the other settings are, at the first communicator.
  const Seen wrong = run({BY_HANDLE, "calls", kBareName}, true, {{"HALFWIRE_HANDLES", "of"}});
  EXPECT_EQ(wrong.outcome.output, "-2 calls\n");
  EXPECT_EQ(wrong.calls, 0u);
}

// The library without its companion, where `halfwire run` finds it: the program gets NCCL, and the report
// says why nothing was intercepted.
TEST_F(Handles, WithoutTheFacadeTheReportSaysSo) {
  const TemporaryDirectory folder;
  std::filesystem::create_directory(folder.path() + "/bin");
  std::filesystem::create_directory(folder.path() + "/lib");
  const std::string command = folder.path() + "/bin/halfwire",
                    library = folder.path() + "/lib/libhalfwire.so";
  std::filesystem::copy_file(HALFWIRE_COMMAND, command);
  std::filesystem::copy_file(libraryPath(), library);
  const std::vector<std::string> argv = {command, "run", "--comms", "all",   "--min-bytes",
                                         "0",     "--",  BY_HANDLE, "calls", kBareName};
  CommandOptions options{false, environment(), 60, ""};
  const CommandOutcome without = runCommand(argv, options);
  EXPECT_TRUE(without.ok()) << without.describe();
  EXPECT_EQ(without.output, "5 calls\n");
  EXPECT_THAT(without.errors, HasSubstr("Nothing was intercepted"));
  EXPECT_THAT(without.errors, HasSubstr("libnccl.so.2 is left alone"));
  EXPECT_THAT(without.errors, HasSubstr(folder.path() + "/lib/libhalfwire-nccl.so"));
  EXPECT_THAT(without.errors, Not(HasSubstr("ended without closing")));

  std::filesystem::copy_file(folderOf(libraryPath()) + "/libhalfwire-nccl.so",
                             folder.path() + "/lib/libhalfwire-nccl.so");
  const CommandOutcome with = runCommand(argv, options);
  EXPECT_TRUE(with.ok()) << with.describe();
  EXPECT_EQ(with.output, "5 calls\n");
  EXPECT_THAT(with.errors, Not(HasSubstr("Nothing was intercepted")));
  EXPECT_THAT(with.errors, Not(HasSubstr("left alone")));

  options.env["HALFWIRE_HANDLES"] = "of";
  const CommandOutcome refused = runCommand(argv, options);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("HALFWIRE_HANDLES='of' is not valid: use on or off"));
}

// The loader follows the search path of the library that calls dlopen, whatever is preloaded in front.
TEST_F(Handles, TheCallersOwnSearchPathHolds) {
#if HALFWIRE_SANITIZED
  GTEST_SKIP() << "the sanitizers' dlopen hides the caller from the loader, with and without the library";
#endif
  for (const std::string& caller : {std::string(RUNPATH_CALLER), std::string(RPATH_CALLER)}) {
    const TemporaryDirectory folder;
    std::filesystem::create_directory(folder.path() + "/nccl");
    const std::string library = folder.path() + "/caller.so";
    std::filesystem::copy_file(caller, library);
    std::filesystem::copy_file(NEIGHBOUR, folder.path() + "/libneighbour.so");
    std::filesystem::copy_file(FAKE_NCCL_PATH, folder.path() + "/nccl/libnccl.so.2");
    const Environment nowhere = {{"LD_LIBRARY_PATH", ""}};
    SCOPED_TRACE(caller);
    expectReached({BY_HANDLE, "through", library, "libneighbour.so"}, 0, nowhere);
    EXPECT_EQ(run({BY_HANDLE, "through", library, "libneighbour.so"}, true, nowhere).outcome.output,
              "answer 7\n");
    // As JAX's plugin has NCCL: in a folder that only the caller's own path names, or by $ORIGIN in the name.
    expectReached({BY_HANDLE, "through", library, kBareName}, 5, nowhere);
    EXPECT_EQ(run({BY_HANDLE, "through", library, "$ORIGIN/nccl/libnccl.so.2"}, true, nowhere).outcome.output,
              "5 calls\n");
    // A loaded library of that name comes before every search.
    expectReached({BY_HANDLE, "through", library, kBareName}, 5,
                  {{"LD_LIBRARY_PATH", ""}, {"HANDLE_CALLER_EARLY", FAKE_NCCL_PATH}});
    // A folder of LD_LIBRARY_PATH comes after an RPATH and before a RUNPATH.
    const TemporaryDirectory other;
    const std::string copy = copyOfNccl(other);
    expectReached({BY_HANDLE, "through", library, kBareName}, 5, {{"LD_LIBRARY_PATH", other.path()}});
    // A library for another machine is passed over, and a file that is none at all ends the search.
    const std::string here = folder.path() + "/libnccl.so.2";
    std::filesystem::copy_file(FAKE_NCCL_PATH, here);
    std::fstream(here, std::ios::in | std::ios::out | std::ios::binary).seekp(18).write("\xff\xfe", 2);
    expectReached({BY_HANDLE, "through", library, kBareName}, 5, nowhere);
    std::filesystem::remove(here);
    std::ofstream(here) << "no library\n";
    expectReached({BY_HANDLE, "through", library, kBareName}, 0, nowhere);
  }
}

TEST_F(Handles, ErrorsOfTheLoaderAreUnchanged) {
  const TemporaryDirectory folder;
  std::ofstream(folder.path() + "/libnccl.so.2") << "no library\n";
  const Environment nowhere = {{"LD_LIBRARY_PATH", ""}};
  for (const std::string& file :
       {std::string("libno-such-library.so"), std::string("libnccl.so.2.99"), folder.path() + "/libnccl.so",
        folder.path() + "/libnccl.so.2", std::string("libnccl.so.20")}) {
    SCOPED_TRACE(file);
    expectReached({BY_HANDLE, "open", file}, 0, nowhere);
    EXPECT_THAT(run({BY_HANDLE, "open", file}, true, nowhere).outcome.output, HasSubstr(file));
  }
}

// A library of NCCL's name that is none.
TEST_F(Handles, WhatIsNotNcclIsLeftAlone) {
  const TemporaryDirectory folder;
  const std::string file = folder.path() + "/libnccl.so.2";
  std::filesystem::copy_file(NEIGHBOUR, file);
  const Seen with = run({BY_HANDLE, "open", file}, true);
  EXPECT_EQ(with.outcome.output, "opened\nthen\n");
  EXPECT_THAT(with.note, HasSubstr("lacks functions"));
}

// One that calls itself otherwise cannot be what the facade needs, and another copy must not be loaded for
// it.
TEST_F(Handles, AnotherSonameIsLeftAlone) {
  const TemporaryDirectory folder;
  const std::string copy = copyOfNccl(folder);
  std::ifstream in(copy, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string soname = std::string("\0libnccl.so.2", 13) + '\0';
  const size_t at = bytes.find(soname);
  ASSERT_NE(at, std::string::npos);
  bytes[at + 12] = '9';
  std::ofstream(copy, std::ios::binary) << bytes;
  const Seen with = run({BY_HANDLE, "calls", "global", copy}, true);
  EXPECT_EQ(with.outcome.output, "5 calls\n") << with.outcome.describe();
  EXPECT_EQ(with.calls, 0u);
  EXPECT_THAT(with.note, HasSubstr("SONAME"));
}

// Only NCCL's own file names count.
TEST_F(Handles, OtherNamesPassBy) {
  const TemporaryDirectory folder;
  for (const char* name : {"libnccl.so.20", "libnccl-net.so", "libmynccl.so.2", "nccl"}) {
    const std::string copy = folder.path() + "/" + name;
    std::filesystem::copy_file(FAKE_NCCL_PATH, copy);
    const Seen with = run({BY_HANDLE, "calls", copy}, true);
    EXPECT_EQ(with.outcome.output, "5 calls\n") << name;
    EXPECT_EQ(with.calls, 0u) << name;
  }
  std::filesystem::copy_file(FAKE_NCCL_PATH, folder.path() + "/libnccl.so.2.28.9");
  expectReached({BY_HANDLE, "calls", folder.path() + "/libnccl.so.2.28.9"}, 5);
}

#ifdef ASAN_PROGRAM
// AddressSanitizer has a dlopen of its own, in front of ours or behind it.
TEST_F(Handles, ProgramsUnderAddressSanitizerStart) {
  const Environment order = {{"ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"}};
  expectReached({ASAN_PROGRAM, "calls", kBareName}, 5, order);
  expectReached({ASAN_PROGRAM, "open", "libno-such-library.so"}, 0, order);
  const Seen behind =
      run({ASAN_PROGRAM, "calls", kBareName}, true, order, std::string(ASAN_RUNTIME) + ":" + libraryPath());
  EXPECT_TRUE(behind.outcome.ok()) << behind.outcome.describe();
  EXPECT_EQ(behind.outcome.output, "5 calls\n");
  EXPECT_EQ(behind.calls, 5u);
}
#endif

}  // namespace
}  // namespace halfwire::testing
