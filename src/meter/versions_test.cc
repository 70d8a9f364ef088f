// Two CUDA runtimes in one process: under the meter each caller still reaches the one it was linked with.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

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

// Without one of these a stream that computes is taken for one that does not, and its waits for none.
TEST(Versions, EveryWayToLaunchAKernelPassesThroughInEveryVersion) {
  void* const meter = dlopen(HALFWIRE_METER_LIBRARY, RTLD_LAZY | RTLD_LOCAL);
  ASSERT_NE(meter, nullptr) << dlerror();
  for (const char* version : {"libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13"}) {
    for (const std::string name : {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel",
                                   "__cudaLaunchKernel", "cudaGraphLaunch"}) {
      for (const char* suffix : {"", "_ptsz"})
        EXPECT_NE(dlvsym(meter, (name + suffix).c_str(), version), nullptr)
            << name << suffix << '@' << version;
    }
  }
  dlclose(meter);
}

}  // namespace
}  // namespace halfwire
