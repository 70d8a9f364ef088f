#include "analysis/groups.h"

#include <gtest/gtest.h>

#include <random>

namespace halfwire::analysis {
namespace {

CommInterval comm(int64_t start, int64_t end, trace::Collective type = trace::Collective::kAllReduce) {
  CommInterval c;
  c.start_ns = start;
  c.end_ns = end;
  c.exposed_ns = end - start;
  c.info.type = type;
  return c;
}

// A job whose truth is known: rank r arrives at arrival[k][r]; all leave `wire` after the last.
TEST(MatchRanks, FindsNeedWaitsAndTheLateRank) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const size_t ranks = 2 + random() % 7;
    const size_t calls = 1 + random() % 30;
    const size_t late = random() % ranks;
    std::vector<Lane> lanes(ranks);
    int64_t need = 0;
    std::vector<int64_t> wait(ranks, 0);
    int64_t now = 0;
    for (size_t k = 0; k < calls; ++k) {
      std::vector<int64_t> arrival(ranks);
      int64_t last = 0;
      for (size_t r = 0; r < ranks; ++r) {
        arrival[r] = now + static_cast<int64_t>(random() % 1000) + (r == late ? 5000 : 0);
        last = std::max(last, arrival[r]);
      }
      const int64_t wire = 100 + static_cast<int64_t>(random() % 900);
      for (size_t r = 0; r < ranks; ++r) {
        lanes[r].segments.push_back({now, arrival[r], State::kCompute});
        lanes[r].segments.push_back({arrival[r], last + wire, State::kExposed});
        lanes[r].comms.push_back(comm(arrival[r], last + wire));
        wait[r] += last - arrival[r];
      }
      need += wire;
      now = last + wire;
    }
    // Recordings begin at different times, and clocks are far apart.
    trace::Strings names;
    std::vector<RankLane> members;
    for (size_t r = 0; r < ranks; ++r) {
      if (random() % 2 == 0) lanes[r].comms.insert(lanes[r].comms.begin(), comm(-900, -800));
      members.push_back(
          {static_cast<int32_t>(r * 3), static_cast<int64_t>(random() % 1000000), &lanes[r], &names});
    }
    bool all_longer = true;
    for (const Lane& l : lanes) all_longer = all_longer && l.comms.size() > calls;
    if (all_longer) continue;  // then the first ones match too
    const Group g = matchRanks(members);
    EXPECT_EQ(g.matched, calls);
    EXPECT_EQ(g.intrinsic_ns, need);
    EXPECT_EQ(g.wait_ns, wait);
    EXPECT_EQ(g.end_skew_max_ns, 0);
    ASSERT_FALSE(g.late.empty());
    EXPECT_EQ(g.late[0].rank, static_cast<int32_t>(late * 3));
    EXPECT_STREQ(lateCauseName(g.late[0].cause), "compute");
  }
}

TEST(MatchRanks, RecordingsOfDifferentTypesAreMatchedByType) {
  Lane a;
  Lane b;
  using trace::Collective;
  a.comms = {comm(0, 10), comm(20, 30, Collective::kAllGather), comm(40, 60)};
  b.comms = {comm(0, 10), comm(45, 60)};  // its all_gather is not recorded
  trace::Strings names;
  const Group g = matchRanks({{0, 0, &a, &names}, {1, 0, &b, &names}});
  EXPECT_EQ(g.mismatched, 1U);
  EXPECT_EQ(g.matched, 2U);
  EXPECT_EQ(g.intrinsic_ns, 25);
}

TEST(MatchRanks, ProcessGroupsAreMatchedApart) {
  trace::Strings names;
  const auto in = [&](CommInterval c, const char* ranks) {
    c.info.group_ranks = static_cast<int32_t>(names.intern(ranks));
    return c;
  };
  // Ranks 0 and 1 share one group, 2 and 3 another; all four share a third.
  std::vector<Lane> lanes(4);
  for (int r = 0; r < 4; ++r) {
    lanes[r].comms.push_back(in(comm(r, 100 + r / 2), r < 2 ? "[0, 1]" : "[2, 3]"));
    lanes[r].comms.push_back(in(comm(200 + r, 300), "[0, 1, 2, 3]"));
  }
  std::vector<RankLane> members;
  for (int r = 0; r < 4; ++r) members.push_back({r, 0, &lanes[r], &names});
  const Group g = matchRanks(members);
  EXPECT_EQ(g.matched, 3U);
  EXPECT_EQ(g.intrinsic_ns, 99 + 98 + 97);
  EXPECT_EQ(g.wait_ns, (std::vector<int64_t>{1 + 3, 0 + 2, 1 + 1, 0}));
}

}  // namespace
}  // namespace halfwire::analysis
