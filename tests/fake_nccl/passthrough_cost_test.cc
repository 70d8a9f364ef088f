// A call that passes through costs at most 60 ns more than without the library.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "support/launch.h"

namespace halfwire::testing {
namespace {

constexpr double kAllowedNs = 60;

double medianNs(bool preload, const Environment& env) {
  const CommandOutcome outcome = runCommand({PASSTHROUGH_COST}, {preload, env, 60, ""});
  EXPECT_TRUE(outcome.ok()) << outcome.describe();
  return outcome.ok() ? std::stod(outcome.output) : 1e9;
}

// Runs alternate, and each side keeps its best: a busy machine only ever adds time.
void expectCheap(const char* what, const Environment& env) {
  double bare = 1e9;
  double with = 1e9;
  for (int round = 0; round < 15; ++round) {
    bare = std::min(bare, medianNs(false, env));
    with = std::min(with, medianNs(true, env));
    if (round >= 2 && with - bare <= kAllowedNs) break;
  }
  printf("%s: %.1f ns a call without the library, %.1f ns with it, %.1f ns more\n", what, bare, with,
         with - bare);
  ::testing::Test::RecordProperty("extra_ns", std::to_string(with - bare));
#if HALFWIRE_SANITIZED
  GTEST_SKIP() << "a sanitized build says nothing about time";
#else
  EXPECT_LE(with - bare, kAllowedNs) << what;
#endif
}

TEST(PassThroughCost, Off) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  expectCheap("mode off", {{"HALFWIRE_MODE", "off"}});
}

TEST(PassThroughCost, WireButNotSelected) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  expectCheap("mode wire, communicator not selected",
              {{"HALFWIRE_MODE", "wire"}, {"HALFWIRE_COMMS", "size:7"}});
}

TEST(PassThroughCost, OffWithRunLog) {
  if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
  const TemporaryDirectory logs;
  expectCheap("mode off, with a run log", {{"HALFWIRE_MODE", "off"}, {"HALFWIRE_LOG_DIR", logs.path()}});
}

}  // namespace
}  // namespace halfwire::testing
