// Checks the tree's own declarations of NCCL against the real nccl.h where a toolkit provides one. The two headers
// cannot meet in one translation unit, so the table is expanded here under the real types.
#include <gtest/gtest.h>

#ifdef HALFWIRE_HAVE_REAL_NCCL
#include <nccl.h>

#include <set>
#include <string>
#include <type_traits>

#include "abi/nccl_functions.h"
#include "abi/nccl_layout.h"

namespace {

#define HALFWIRE_CHECK_SIGNATURE(ret, name, params, args)                                       \
  static_assert(std::is_same_v<decltype(&name), ret(*) params>, #name " differs from nccl.h"); \
  static_assert(std::is_same_v<decltype(&p##name), ret(*) params>, "p" #name " differs from nccl.h");
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_CHECK_SIGNATURE)

TEST(NcclAbi, ValuesAndLayoutsEqualTheRealHeader) {
  const auto real = halfwire::abi::describeNcclLayout();
  const auto& ours = halfwire::abi::ownNcclLayout();
  ASSERT_EQ(real.size(), ours.size());
  for (size_t i = 0; i < real.size(); ++i) EXPECT_EQ(real[i], ours[i]) << "entry " << i << " of nccl_layout.h";
}

}  // namespace
#else
TEST(NcclAbi, RealHeader) { GTEST_SKIP() << "no nccl.h on this machine: install the CUDA toolkit with NCCL to check the table"; }
#endif
