#include "analysis/collectives.h"

#include <gtest/gtest.h>

namespace halfwire::analysis {
namespace {

using trace::Collective;
using trace::ElementType;

TEST(Collectives, BytesAndBusFactorsFollowNcclTests) {
  trace::CommInfo info;
  info.element = ElementType::kBf16;
  info.has_sizes = true;
  info.in_elements = 1000;
  info.out_elements = 8000;
  info.group_size = 8;
  info.type = Collective::kAllReduce;
  EXPECT_EQ(collectiveBytes(info), 2000);
  info.type = Collective::kAllGather;
  EXPECT_EQ(collectiveBytes(info), 16000);
  info.out_elements = 0;
  EXPECT_EQ(collectiveBytes(info), 16000);
  info.element = ElementType::kUnknown;
  EXPECT_EQ(collectiveBytes(info), -1);
  EXPECT_DOUBLE_EQ(busFactor(Collective::kAllReduce, 8), 1.75);
  EXPECT_DOUBLE_EQ(busFactor(Collective::kReduceScatter, 4), 0.75);
  EXPECT_DOUBLE_EQ(busFactor(Collective::kSendRecv, 8), 1);
}

TEST(Collectives, SavingIsThatOfTheWireFormat) {
  EXPECT_DOUBLE_EQ(fp8Saving(ElementType::kBf16), 0.484375);
  EXPECT_DOUBLE_EQ(fp8Saving(ElementType::kFp32), 0.7421875);
  EXPECT_DOUBLE_EQ(fp8Saving(ElementType::kInt32), 0);
}

TEST(Collectives, RowsAddUp) {
  trace::Strings names;
  std::vector<CommInterval> comms(3);
  for (size_t i = 0; i < 3; ++i) {
    comms[i].start_ns = static_cast<int64_t>(i) * 100;
    comms[i].end_ns = comms[i].start_ns + 50;
    comms[i].exposed_ns = 20;
    comms[i].info.type = Collective::kAllReduce;
    comms[i].info.element = ElementType::kBf16;
    comms[i].info.has_sizes = i < 2;
    comms[i].info.in_elements = 1024;
  }
  const auto rows = tabulate(names, comms, {50, 10, 50}, 2);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].count + rows[1].count, 3);
  const auto& sized = rows[0].sized > 0 ? rows[0] : rows[1];
  EXPECT_EQ(sized.bytes, 4096);
  EXPECT_EQ(sized.bucket, 2048U);
  EXPECT_EQ(sized.needed_ns, 60);
  EXPECT_EQ(sized.exposed_needed_ns, 30);
  EXPECT_DOUBLE_EQ(sized.algbw_gbps, 4096.0 / 60);
  EXPECT_DOUBLE_EQ(sized.busbw_gbps, 4096.0 / 60);
}

}  // namespace
}  // namespace halfwire::analysis
