// Which names of ranges are steps.
#include "meter/nvtx_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace halfwire::meter {
namespace {

using ::testing::IsNull;
using ::testing::StrEq;

TEST(NvtxSteps, TheUsualNamesWithOrWithoutANumber) {
  const StepRanges ranges("");
  for (const char* text :
       {"iteration", "iteration 17", "Iteration 17", "iteration:0", "ITERATION_3", "iteration17"})
    EXPECT_THAT(ranges.nameOf(text), StrEq("iteration")) << text;
  for (const char* text : {"step", "step 17", "Step #3", "step 18446744073709551615"})
    EXPECT_THAT(ranges.nameOf(text), StrEq("step")) << text;
  EXPECT_THAT(ranges.nameOf("ProfilerStep#17"), StrEq("ProfilerStep"));
  EXPECT_THAT(ranges.nameOf("train_step 4"), StrEq("train_step"));
  for (const char* text :
       {"", "ste", "steps", "stepping", "step a", "step 1 of 3", "step 1.5", "step -1", "step ", "my step",
        "optimizer.step", "Optimizer.step#SGD.step", "AllReduce", "iteration 123456789012345678901"})
    EXPECT_THAT(ranges.nameOf(text), IsNull()) << text;
  // Texts without an end, with zeros in them.
  EXPECT_THAT(ranges.nameOf(std::string(5000, 's')), IsNull());
  EXPECT_THAT(ranges.nameOf(std::string("step\0 1", 7)), IsNull());
}

TEST(NvtxSteps, AnotherNameReplacesThem) {
  const StepRanges ranges("Epoch 2/batch");
  EXPECT_THAT(ranges.nameOf("Epoch 2/batch 7"), StrEq("Epoch 2/batch"));
  EXPECT_THAT(ranges.nameOf("Epoch 2/batch"), StrEq("Epoch 2/batch"));
  EXPECT_THAT(ranges.nameOf("epoch 2/batch 7"), IsNull());
  EXPECT_THAT(ranges.nameOf("iteration 7"), IsNull());
}

TEST(NvtxSteps, NamesAreChecked) {
  EXPECT_TRUE(isRangeName("x"));
  EXPECT_TRUE(isRangeName(std::string(kMostRangeName, 'x')));
  for (const std::string& name :
       {std::string(), std::string(kMostRangeName + 1, 'x'), std::string(" x"), std::string("x "),
        std::string("a\nb"), std::string("a\0b", 3), std::string("\xc3\xa9")}) {
    EXPECT_FALSE(isRangeName(name)) << name;
    if (name.empty()) continue;
    EXPECT_THAT(StepRanges(name).nameOf(name), IsNull()) << name;
    EXPECT_THAT(StepRanges(name).nameOf(""), IsNull()) << name;
    EXPECT_THAT(StepRanges(name).nameOf("step 1"), IsNull()) << name;
  }
}

TEST(NvtxSteps, HandlesAreWhatWasReturnedAndNothingElse) {
  const StepRanges usual(""), wanted("batch");
  const char* step = usual.nameOf("step 3");
  EXPECT_EQ(usual.nameOfHandle(step), step);
  EXPECT_THAT(wanted.nameOfHandle(step), IsNull());
  const char* batch = wanted.nameOf("batch 3");
  EXPECT_EQ(wanted.nameOfHandle(batch), batch);
  for (const void* other : {static_cast<const void*>(nullptr), reinterpret_cast<const void*>(8)}) {
    EXPECT_THAT(usual.nameOfHandle(other), IsNull());
    EXPECT_THAT(wanted.nameOfHandle(other), IsNull());
  }
}

}  // namespace
}  // namespace halfwire::meter
