// `halfwire run` from outside: what it starts, refuses, passes on and says.
#include <elf.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "launch/launch.h"

namespace halfwire {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Ran {
  int exit_code = -1;  // 128 + signal if one ended it
  std::string out, err;
};

std::string contents(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class RunBase : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/halfwire-run-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    fs::create_directories(root_ / "tmp");
    environment_ = currentEnvironment();
    std::erase_if(environment_, [](const std::string& e) {
      return e.starts_with("HALFWIRE_") || e.starts_with("LD_PRELOAD=");
    });
    unsetVariable(&environment_, "WORLD_SIZE");
    setVariable(&environment_, "TMPDIR", root_ / "tmp");
    setVariable(&environment_, "DIR", root_);
    // Of a build with AddressSanitizer, which is in every program of these tests: what bash leaves behind at its
    // end is not ours, and one test puts another library in front of the runtime.
    setVariable(&environment_, "ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0");
  }
  void TearDown() override { fs::remove_all(root_); }

  pid_t start(const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {command_};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const pid_t pid = fork();
    if (pid != 0) return pid;
    for (const auto& [fd, name] : {std::pair(1, "out"), std::pair(2, "err")}) {
      dup2(open((root_ / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd);
    }
    std::vector<char*> argv, envp;
    for (std::string& s : command) argv.push_back(s.data());
    for (std::string& s : environment_) envp.push_back(s.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    execve(argv[0], argv.data(), envp.data());
    _exit(99);
  }

  Ran finish(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), contents(root_ / "out"),
            contents(root_ / "err")};
  }

  Ran halfwire(const std::vector<std::string>& arguments) { return finish(start(arguments)); }
  Ran bash(std::vector<std::string> options, const std::string& script) {
    options.insert(options.begin(), "run");
    for (const char* s : {"--", "bash", "-c", script.c_str()}) options.push_back(s);
    return halfwire(options);
  }

  bool waitFor(const std::string& name) {
    for (int i = 0; i < 1000; ++i) {
      if (fs::exists(root_ / name)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  fs::path root_;
  std::string command_;
  std::vector<std::string> environment_;
};

// With a library that does nothing, beside a copy of the command.
class Run : public RunBase {
 protected:
  void SetUp() override {
    RunBase::SetUp();
    fs::create_directories(root_ / "bin");
    fs::create_directories(root_ / "lib");
    fs::copy_file(HALFWIRE_COMMAND, root_ / "bin/halfwire");
    library_ = root_ / "lib/libhalfwire.so";
    fs::copy_file(HALFWIRE_STUB, library_);
    command_ = root_ / "bin/halfwire";
  }

  // Refused with exit code 2 and one line, and nothing was run.
  void expectRefused(const std::vector<std::string>& options, const std::string& words) {
    fs::remove(root_ / "ran");
    const Ran r = bash(options, ": >$DIR/ran");
    EXPECT_EQ(r.exit_code, 2) << r.err;
    EXPECT_THAT(r.err, HasSubstr(words));
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_FALSE(fs::exists(root_ / "ran")) << words;
    EXPECT_TRUE(fs::is_empty(root_ / "tmp"));
  }

  fs::path library_;
};

TEST_F(Run, ExitCodesComeBack) {
  EXPECT_EQ(bash({}, "exit 0").exit_code, 0);
  EXPECT_EQ(bash({}, "exit 7").exit_code, 7);
  EXPECT_EQ(bash({}, "kill -9 $$").exit_code, 137);
  EXPECT_EQ(bash({"-n", "3"}, "[ $RANK = 1 ] || sleep 2; exit $RANK").exit_code, 1);
}

TEST_F(Run, OutputIsTheProgramsAndTheReportIsOnStandardError) {
  const Ran r = bash({}, "echo hello");
  EXPECT_EQ(r.out, "hello\n");
  EXPECT_THAT(r.err, HasSubstr("Nothing was intercepted"));
  EXPECT_THAT(r.err, HasSubstr("linked statically"));
  EXPECT_TRUE(fs::is_empty(root_ / "tmp"));
}

TEST_F(Run, SettingsReachTheProgram) {
  const Ran r =
      bash({"--mode",    "wire",      "--format", "int8",    "--block",     "64",   "--scale",       "e8m0",
            "--ops",     "allreduce", "--comms",  "size:2",  "--min-bytes", "1MiB", "--chunk-bytes", "8MiB",
            "--overlap", "off",       "--address", "127.0.0.2", "--link",   "300Mbit", "--hw-queues", "1",    "--delay-us",    "50"},
           "env | grep ^HALFWIRE_ | grep -v LOG_DIR | sort; [ -d $HALFWIRE_LOG_DIR ] && stat -c %a "
           "$HALFWIRE_LOG_DIR");
  EXPECT_EQ(
      r.out,
      "HALFWIRE_ADDRESS=127.0.0.2\nHALFWIRE_BLOCK=64\nHALFWIRE_CHUNK_BYTES=8MiB\nHALFWIRE_COMMS=size:2\n"
      "HALFWIRE_FORMAT=int8\nHALFWIRE_HOST_DELAY_US=50\nHALFWIRE_HOST_HW_QUEUES=1\nHALFWIRE_HOST_LINK="
      "300Mbit\n"
      "HALFWIRE_MIN_BYTES=1MiB\nHALFWIRE_MODE=wire\nHALFWIRE_OPS=allreduce\nHALFWIRE_OVERLAP=off\nHALFWIRE_SCALE=e8m0\n700\n");
}

TEST_F(Run, ModeIsWireUnlessSaidOtherwise) {
  EXPECT_EQ(bash({}, "echo $HALFWIRE_MODE").out, "wire\n");
  EXPECT_EQ(bash({"--mode", "off"}, "echo $HALFWIRE_MODE").out, "off\n");
  setVariable(&environment_, "HALFWIRE_MODE", "off");
  EXPECT_EQ(bash({}, "echo $HALFWIRE_MODE").out, "off\n");
  EXPECT_EQ(bash({"--mode", "wire"}, "echo $HALFWIRE_MODE").out, "wire\n");
}

TEST_F(Run, AnExistingPreloadStaysInFront) {
  fs::copy_file(HALFWIRE_STUB, root_ / "other.so");
  EXPECT_THAT(bash({}, "echo $LD_PRELOAD").out, ::testing::EndsWith(library_.string() + "\n"));
  setVariable(&environment_, "LD_PRELOAD", root_ / "other.so");
  EXPECT_THAT(bash({}, "echo $LD_PRELOAD").out,
              HasSubstr((root_ / "other.so").string() + ":" + library_.string() + "\n"));
}

TEST_F(Run, TheCommandIsTakenAsItIs) {
  const Ran r = halfwire({"run", "--", "bash", "-c", "printf '%s|' \"$@\"", "x", "--mode", "off", "--", "-n",
                          "", "a b", "--help"});
  EXPECT_EQ(r.out, "--mode|off|--|-n||a b|--help|");
}

TEST_F(Run, RanksAreStartedAsByTorchrun) {
  const Ran r = bash(
      {"-n", "3"},
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR >$DIR/$RANK; echo $MASTER_PORT");
  for (int rank = 0; rank < 3; ++rank) {
    const std::string k = std::to_string(rank);
    EXPECT_EQ(contents(root_ / k), k + " 3 " + k + " 3 127.0.0.1\n");
  }
  const std::string port = r.out.substr(0, r.out.find('\n') + 1);
  EXPECT_EQ(r.out, port + port + port);
  EXPECT_GT(std::stoi(port), 1023);
}

TEST_F(Run, ADeadRankEndsTheJobAndIsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  const Ran r = bash({"-n", "3"}, "[ $RANK = 1 ] && kill -9 $$; sleep 60");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(r.exit_code, 137);
  EXPECT_THAT(r.err, HasSubstr("rank 1 was ended by signal 9 (Killed): 2 other ranks were stopped"));
}

TEST_F(Run, SignalsArePassedOn) {
  const pid_t pid =
      start({"run", "--", "bash", "-c", "trap 'exit 33' TERM; : >$DIR/ready; while :; do sleep 0.05; done"});
  ASSERT_TRUE(waitFor("ready"));
  kill(pid, SIGTERM);
  const Ran r = finish(pid);
  EXPECT_EQ(r.exit_code, 33);
  EXPECT_THAT(r.err, HasSubstr("Nothing was intercepted"));
}

TEST_F(Run, BadOptionsAreRefusedBeforeAnythingRuns) {
  expectRefused({"--mode", "on"}, "--mode 'on' is not valid: use off, ");
  expectRefused({"--format", "e4m4"}, "--format 'e4m4' is not valid: use e4m3, e3m4, e5m2 or int8");
  expectRefused({"--block", "100"}, "--block '100' is not valid");
  expectRefused({"--scale", "fp16"}, "--scale 'fp16' is not valid");
  expectRefused({"--ops", "send"}, "--ops 'send' is not valid");
  expectRefused({"--comms", "size:0"}, "--comms 'size:0' is not valid");
  expectRefused({"--min-bytes", "4mb"}, "--min-bytes '4mb' is not valid");
  expectRefused({"--min-bytes", ""}, "--min-bytes");
  expectRefused({"--chunk-bytes", "1"}, "--chunk-bytes '1' is not valid");
  expectRefused({"--address", "example.org"}, "--address 'example.org' is not valid");
  expectRefused({"--link", "300"}, "--link '300' is not valid");
  expectRefused({"--hw-queues", "33"}, "--hw-queues '33' is not valid");
  expectRefused({"--delay-us", "-1"}, "--delay-us '-1' is not valid");
  expectRefused({"-n", "0"}, "-n '0' is not a valid number of ranks");
  expectRefused({"-n", "4x"}, "-n '4x'");
  expectRefused({"--blok", "128"}, "'--blok' is not known here (the program to run goes after --)");
  expectRefused({"--mode"}, "--mode needs a value");
  expectRefused({"python"}, "'python' is not known here");
  setVariable(&environment_, "HALFWIRE_BLOCK", "7");
  expectRefused({}, "HALFWIRE_BLOCK='7' is not valid");
  unsetVariable(&environment_, "HALFWIRE_BLOCK");
  setVariable(&environment_, "HALFWIRE_MIN_BYTE", "0");
  expectRefused({}, "HALFWIRE_MIN_BYTE in the environment is no setting");
}

TEST_F(Run, CommandsThatCannotRunAreRefused) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"run"},
                                             {"run", "--"},
                                             {"run", "--", "/nonexistent"},
                                             {"run", "-n", "2", "--", "no-such-program"},
                                             {"run", "--", ""}}) {
    const Ran r = halfwire(arguments);
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_THAT(r.err, StartsWith("halfwire run: "));
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_TRUE(fs::is_empty(root_ / "tmp"));
  }
}

TEST_F(Run, LibrariesThatDoNotLoadAreRefused) {
  const std::string good = contents(library_);
  const auto with = [&](const std::string& bytes) {
    std::ofstream(library_, std::ios::binary | std::ios::trunc) << bytes;
  };
  with("this is no library");
  expectRefused({}, "build Halfwire");
  std::string foreign = good;
  foreign[EI_CLASS] = ELFCLASS32;
  with(foreign);
  expectRefused({}, "no library for this kind of processor");
  foreign = good;
  const Elf64_Half machine = EM_AARCH64;
  std::memcpy(foreign.data() + offsetof(Elf64_Ehdr, e_machine), &machine, sizeof machine);
  with(foreign);
  expectRefused({}, "loader refuses");
  with(good.substr(0, 300));
  expectRefused({}, "loader refuses");
  fs::copy_file(HALFWIRE_OTHER_LIBRARY, library_, fs::copy_options::overwrite_existing);
  expectRefused({}, "loader refuses");  // loads, but is not ours
  fs::remove(library_);
  expectRefused({}, "cannot read");
}

TEST_F(Run, FoldersThatCannotBeWrittenAreRefused) {
  std::ofstream(root_ / "file") << "x";
  expectRefused({"--log", root_ / "file"}, "--log");
  expectRefused({"--log", root_ / "file/below"}, "--log");
  setVariable(&environment_, "TMPDIR", "/nonexistent");
  const Ran r = bash({}, ": >$DIR/ran");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_THAT(r.err, HasSubstr("set TMPDIR"));
  EXPECT_FALSE(fs::exists(root_ / "ran"));
}

TEST_F(Run, BlocksThatSaveLessAreMentioned) {
  EXPECT_THAT(bash({"--block", "32"}, "").err, HasSubstr("save 43.8 %"));
  EXPECT_THAT(bash({"--block", "64"}, "").err, HasSubstr("save 46.9 %"));
  EXPECT_THAT(bash({"--block", "32", "--scale", "e8m0"}, "").err, Not(HasSubstr("save")));
  EXPECT_THAT(bash({"--block", "32", "--mode", "off"}, "").err, Not(HasSubstr("save 4")));
}

TEST_F(Run, HelpIsAsDocumented) {
  const fs::path golden = fs::path(HALFWIRE_TESTDATA);
  for (const auto& [name, arguments] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"run", {"run", "--help"}},
           {"bench-codec", {"bench", "codec", "--help"}},
           {"bench-collective", {"bench", "collective", "--help"}}}) {
    const Ran r = halfwire(arguments);
    EXPECT_EQ(r.exit_code, 0);
    EXPECT_EQ(r.out, contents(golden / ("help-" + name + ".txt"))) << "help of " << name << " changed";
  }
  EXPECT_EQ(halfwire({}).exit_code, 2);
  EXPECT_EQ(halfwire({"fly"}).exit_code, 2);
  EXPECT_THAT(halfwire({"--help"}).out, HasSubstr("Examples:"));
}

TEST_F(Run, BenchRefusesBadOptions) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"codec", "--format", "fp8"},
                                             {"codec", "--elements", "0"},
                                             {"codec", "--block", "128,100"},
                                             {"codec", "--op", ""},
                                             {"collective", "--engine", "nccl"},
                                             {"collective", "-n", "1"},
                                             {"collective", "--link", "fast"},
                                             {"collective", "--bytes", "3"},
                                             {"collective", "--type", "int8"},
                                             {"collective", "--repeat", "0"},
                                             {"collective", "--op", "reduce"},
                                             {"neither"},
                                             {}}) {
    std::vector<std::string> all = {"bench"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Ran r = halfwire(all);
    EXPECT_EQ(r.exit_code, 2) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    EXPECT_EQ(r.out, "");
  }
}

#ifdef HALFWIRE_RUN_TEST_PROGRAM
// With the real library and a job on the host engine.
class RunJob : public RunBase {
 protected:
  void SetUp() override {
    RunBase::SetUp();
    command_ = HALFWIRE_COMMAND;
  }
  Ran job(const std::string& end, std::vector<std::string> options) {
    options.insert(options.begin(), "run");
    for (const char* s : {"-n", "2", "--", HALFWIRE_RUN_TEST_PROGRAM, end.c_str()}) options.push_back(s);
    return halfwire(options);
  }
};

TEST_F(RunJob, TheTableTellsWhatWasCompressedAndWhyTheRestWasNot) {
  const Ran r = job("return", {"--log", root_ / "log"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.err, HasSubstr("Halfwire: 2 processes, host engine"));
  EXPECT_THAT(r.err, HasSubstr("of 2 ranks: compresses; scratch"));
  EXPECT_THAT(r.err, HasSubstr("compressed, "));
  EXPECT_THAT(r.err, HasSubstr("exact: smaller than --min-bytes"));
  EXPECT_THAT(r.err, Not(HasSubstr("Nothing was intercepted")));
  for (const char* name : {"rank0.json", "rank1.json"}) {
    const auto json = nlohmann::json::parse(contents(root_ / "log" / name));
    EXPECT_EQ(json["world"], 2);
    const auto& calls = json["communicators"][0]["calls"];
    ASSERT_EQ(calls.size(), 2u);
    for (const auto& call : calls) {
      const bool compressed = call["compressed"];
      EXPECT_EQ(call["calls"], compressed ? 2 : 1);
      EXPECT_EQ(call["bytes_exact_ring"], compressed ? 2 << 23 : 128);
      const double ratio = call["bytes_sent"].get<double>() / call["bytes_exact_ring"].get<double>();
      EXPECT_LT(ratio, compressed ? 0.5157 : 1.001);
    }
  }
  // Nothing but the JSON stays.
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(root_ / "log")) ++files;
  EXPECT_EQ(files, 2u);
}

TEST_F(RunJob, TheTableSurvivesHowTheProgramEnded) {
  const Ran exited = job("_exit", {});
  EXPECT_EQ(exited.exit_code, 5);
  EXPECT_THAT(exited.err, HasSubstr("of 2 ranks: compresses"));
  const Ran killed = job("kill", {});
  EXPECT_EQ(killed.exit_code, 137);
  EXPECT_THAT(killed.err, HasSubstr("of 2 ranks: compresses"));
  const Ran one = job("kill-rank-1", {});
  EXPECT_EQ(one.exit_code, 137);
  EXPECT_THAT(one.err, HasSubstr("of 2 ranks: compresses"));
  EXPECT_THAT(one.err, HasSubstr("rank 1 was ended by signal 9"));
}

TEST_F(RunJob, OffCountsAndSaysSo) {
  const Ran r = job("return", {"--mode", "off"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_THAT(r.err, HasSubstr("exact: Halfwire is off (--mode off)"));
  EXPECT_THAT(r.err, HasSubstr("1.000"));
}
#endif

}  // namespace
}  // namespace halfwire
