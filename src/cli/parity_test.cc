// `halfwire parity` as a program: its words beside those kept in testdata, its exit codes, its memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/command_test.h"

namespace halfwire {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A run by formula: no random numbers, so that its figures are the same everywhere.
struct Made {
  int run = 0;
  int steps = 200;
  double gap = 0;
  int ranks = 2;
  std::function<double(int)> rate = [](int t) {
    return 1e-3 * std::min(1.0, (t + 1) / 10.0) * (1 - t / 400.0);
  };
};

class Parity : public CommandTest {
 protected:
  Parity() : CommandTest("parity") {}

  void record(const std::string& name, const Made& made) {
    fs::create_directories(root_ / name);
    for (int rank = 0; rank < made.ranks; ++rank) {
      std::FILE* file = std::fopen((root_ / name / fmt::format("rank{}.jsonl", rank)).c_str(), "w");
      fmt::print(
          file,
          R"({{"halfwire_parity":1,"rank":{},"world_size":{},"seed":{},"precision":"fp32","accumulation":1,"sharded":false,"elements":4096,"sampled_elements":4096,"dropout":0,"tied":0}}
)",
          rank, made.ranks, made.run);
      for (int t = 0; t < made.steps; ++t) {
        const double wave =
            std::sin(0.7 * t + 2.1 * made.run + rank) + std::sin(1.9 * t + made.run * made.run);
        const double loss = 2 + made.gap + 2.5 * std::exp(-8.0 * t / made.steps) + 0.01 * wave +
                            0.001 * std::sin(5.0 * made.run);
        const double norm = 0.5 + std::exp(-t / 20.0) + 0.05 * std::sin(3.0 * t + made.run);
        const double lr = made.rate(t);
        fmt::print(
            file,
            R"({{"step":{},"samples":{},"loss":{:.9g},"batch_hash":"{:016x}","groups":[{{"lr":{:.9g},"grad_norm":{:.6g},"grad_norm_clipped":{:.6g},"update_norm":{:.6g},"unchanged":0,"param_norm":12.1,"param_sum":{:.9g},"param_hash":"{:016x}","nonfinite":0,"state_dtype":"float32"}}]}}
)",
            t, 64 * (t + 1), loss,
            uint64_t{1} << 40 | static_cast<uint64_t>(made.run) << 32 | static_cast<uint64_t>(t) << 4 |
                static_cast<uint64_t>(rank),
            lr, norm, std::min(norm, 1.0), lr * 60, -3.25 + 0.001 * t,
            static_cast<uint64_t>(made.run + 1) << 32 | static_cast<uint64_t>(t));
      }
      std::fclose(file);
    }
  }

  void expectGolden(const std::string& name, const std::string& text) {
    const fs::path path = fs::path(HALFWIRE_TESTDATA) / name;
    if (std::getenv("HALFWIRE_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << text;
    EXPECT_EQ(text, contents(path)) << name;
  }
};

TEST_F(Parity, WordsAreAsKept) {
  for (int i = 0; i < 3; ++i) {
    record(fmt::format("exact/{}", i), {i});
    record(fmt::format("near/{}", i), {i + 10});
    record(fmt::format("far/{}", i), {i + 20, 200, 0.08});
  }
  const Ran equal = halfwire({"exact", "--candidate", "near"});
  EXPECT_EQ(equal.code, 0) << equal.err;
  expectGolden("parity-equivalent.txt", equal.out);
  const Ran different = halfwire({"exact", "--candidate", "far"});
  EXPECT_EQ(different.code, 1);
  expectGolden("parity-different.txt", different.out);
  const Ran undecided = halfwire({"exact/0", "--candidate", "near/0"});
  EXPECT_EQ(undecided.code, 2);
  expectGolden("parity-one-a-side.txt", undecided.out);
  Made warm{3};
  warm.rate = [](int t) { return 1e-3 * std::min(1.0, t / 10.0); };
  record("warm", warm);
  const Ran alone = halfwire({"warm"});
  EXPECT_EQ(alone.code, 0);
  expectGolden("parity-warm-up-from-0.txt", alone.out);
  Made lost{3};
  lost.rate = [](int t) { return t == 0 ? 0 : 1e-3; };
  record("lost", lost);
  const Ran hard = halfwire({"lost"});
  EXPECT_EQ(hard.code, 1);
  expectGolden("parity-step0-no-op.txt", hard.out);
  const Ran shifted = halfwire({"warm", "--candidate", "lost", "--json"});
  EXPECT_EQ(shifted.code, 1);
  expectGolden("parity-json.txt", shifted.out);
  // Twins of one seed, for one run a side.
  const Ran floor = halfwire(
      {"exact/0", "--candidate", "near/0", "--noise", "exact/1", "exact/2", "near/1", "--margin", "0.02"});
  EXPECT_EQ(floor.code, 0) << floor.out;
  EXPECT_THAT(floor.out, HasSubstr("(noise runs)"));
}

TEST_F(Parity, HelpIsAsKept) {
  const Ran help = halfwire({"--help"});
  EXPECT_EQ(help.code, 0);
  expectGolden("help-parity.txt", help.out);
}

TEST_F(Parity, BadInputIsExitCode2AndOneSentence) {
  record("good", {0});
  const auto refused = [&](std::vector<std::string> arguments, const char* words) {
    const Ran r = halfwire(std::move(arguments));
    EXPECT_EQ(r.code, 2);
    EXPECT_EQ(r.out, "");
    EXPECT_THAT(r.err, HasSubstr(words));
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1);
  };
  refused({"none"}, "does not exist");
  refused({}, "RUN");
  refused({"good", "--margin", "much"}, "--margin 'much'");
  refused({"good", "--margin", "-1"}, "--margin");
  refused({"good", "--margin", "nan"}, "--margin");
  refused({"good", "--gross", "3"}, "--gross");
  refused({"good", "--tail", "99%"}, "--tail");
  refused({"good", "--noise", "good"}, "--candidate");
  refused({"good", "--margin-steps", "0"}, "margin-steps");
  refused({"good", "--html", "no/such/folder/a.html"}, "cannot be created");
  fs::create_directories(root_ / "bad");
  std::ofstream(root_ / "bad/rank0.jsonl")
      << "{\"halfwire_parity\":1}\n{\"step\":0,\"loss\":[]}\n{\"step\":1}\n";
  refused({"good", "--candidate", "bad"}, "line 2: `loss`");
  refused({"bad/rank0.jsonl"}, "line 2");
}

TEST_F(Parity, WritesThePage) {
  record("a", {0});
  record("b", {1});
  const Ran r = halfwire({"a", "--candidate", "b", "--html", "page.html"});
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(contents(root_ / "page.html"), HasSubstr("<!doctype html>"));
  EXPECT_FALSE(fs::exists(root_ / "page.html.part"));
}

// A million lines, half of them a side, in time and memory that do not hurt.
TEST_F(Parity, AMillionLines) {
#ifdef HALFWIRE_SANITIZED
  GTEST_SKIP() << "a sanitizer takes its own time and memory";
#endif
  record("a", {0, 500'000, 0, 1});
  record("b", {1, 500'000, 0, 1});
  const Ran r = halfwire({"a", "--candidate", "b"});
  EXPECT_EQ(r.code, 2) << r.err;
  EXPECT_LT(r.peak_bytes, 300U << 20);
  EXPECT_LT(r.seconds, 15);  // alone on a core 2 to 3; tests share theirs
}

}  // namespace
}  // namespace halfwire
