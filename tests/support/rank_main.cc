// main() of test programs whose ranks are processes: the same executable is the test and each of its ranks.
#include <gtest/gtest.h>

#include "support/rank.h"

int main(int argc, char** argv) {
  if (const auto code = halfwire::testing::runAsRank(argc, argv)) return *code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
