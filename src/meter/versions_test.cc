// Two CUDA runtimes in one process: under the meter each caller still reaches the one it was linked with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/launch.h"

namespace halfwire {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Versions, EachCallerReachesItsOwnRuntime) {
  for (const bool preload : {false, true}) {
    testing::CommandOptions options;
    options.preload = preload;
    options.library = HALFWIRE_METER_LIBRARY;
    const auto outcome = testing::runCommand({TWO_RUNTIMES, CALLER_13, CALLER_12}, options);
    ASSERT_TRUE(outcome.ok()) << outcome.describe();
    EXPECT_THAT(outcome.output, StartsWith("13 12 ")) << preload;
    if (preload) EXPECT_THAT(outcome.output, HasSubstr("libhalfwire-meter.so"));
  }
}

}  // namespace
}  // namespace halfwire
