// Compressed sends and receives of all ranks in one thread, with the scalar reference as the oracle.
#include "collective/messages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "collective/test_world.h"
#include "wire/rounded.h"

namespace halfwire {
namespace {

struct MessageWorld {
  explicit MessageWorld(uint32_t ranks, uint64_t limit = 64u << 20, bool stochastic = false)
      : api(fakeApi()) {
    wire = {};
    for (uint32_t r = 0; r < ranks; ++r) {
      auto made = Messages::create(&api, &device, {commOf(r), format, limit, stochastic, 9, 0, r});
      EXPECT_TRUE(made.ok());
      members.push_back(std::move(made).value());
    }
  }
  ncclResult_t run(const std::vector<std::vector<Message>>& calls, std::string* error = nullptr) {
    turns.assign(members.size(), {});
    for (size_t r = 0; r < members.size(); ++r) {
      turns[r].messages = members[r].get();
      turns[r].calls = calls[r];
    }
    std::string unread;
    return Messages::run(turns, gate, error != nullptr ? error : &unread);
  }
  WireFormat format{ElementFormat::kE4M3, ScaleFormat::kFp32, 64};
  NcclApi api;
  ImmediateDevice device;
  OpenGate gate;
  std::vector<std::unique_ptr<Messages>> members;
  std::vector<Messages::Turn> turns;
};

TEST(Messages, ArriveRoundedOnceInTheOrderOfEachPairBesideExactOnes) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const uint32_t ranks = 2 + random() % 3;
    MessageWorld world(ranks);
    struct Sent {
      int from, to;
      bool exact;
      std::vector<float> values, got;
    };
    std::vector<Sent> sent(1 + random() % 12);
    for (size_t i = 0; i < sent.size(); ++i) {
      // Messages to oneself too, and none at all.
      sent[i] = {static_cast<int>(random() % ranks),
                 static_cast<int>(random() % ranks),
                 random() % 3 == 0,
                 randomFloats(1 + random() % 3000, static_cast<uint32_t>(seed * 100 + i)),
                 {}};
      sent[i].got.assign(sent[i].values.size(), -7.0f);
    }
    std::vector<std::vector<Message>> calls(ranks);
    uint64_t packets = 0;
    for (Sent& s : sent) {
      const size_t bytes = s.values.size() * sizeof(float);
      Message send{true, s.values.data(), s.values.size(), DataType::kFp32, s.to};
      Message receive{false, s.got.data(), s.values.size(), DataType::kFp32, s.from};
      if (s.exact) {
        send.exact = [&, bytes] {
          return world.api.ncclSend(s.values.data(), bytes, ncclUint8, s.to, commOf(s.from), nullptr);
        };
        receive.exact = [&, bytes] {
          return world.api.ncclRecv(s.got.data(), bytes, ncclUint8, s.from, commOf(s.to), nullptr);
        };
      } else {
        packets += packetBytes(world.format, s.values.size());
      }
      // Sends and receives of a rank mix as they like; each pair's own order stays.
      calls[s.from].push_back(send);
      calls[s.to].push_back(receive);
    }
    ASSERT_EQ(world.run(calls), ncclSuccess) << seed;
    EXPECT_FALSE(wire.broken) << seed;
    EXPECT_LE(wire.groups, 1);
    for (const Sent& s : sent) {
      const auto want = s.exact ? s.values : rounded(world.format, s.values);
      ASSERT_EQ(std::memcmp(s.got.data(), want.data(), want.size() * sizeof(float)), 0) << "seed " << seed;
    }
    uint64_t counted = 0;
    for (const Messages::Turn& turn : world.turns) {
      for (const CallStats& stats : turn.stats) counted += stats.sent_bytes;
    }
    EXPECT_EQ(counted, packets);
  }
}

TEST(Messages, ScratchGrowsToWhatAGroupNeedsAndNoFurtherThanItsLimit) {
  MessageWorld world(2, 3u << 20);
  EXPECT_EQ(world.members[0]->scratchHeld(), 0u);
  std::vector<float> a(1u << 20, 1.0f), b(1u << 20);
  const auto exchange = [&](uint64_t count, int copies, std::string* error) {
    std::vector<std::vector<Message>> calls(2);
    for (int i = 0; i < copies; ++i) {
      calls[0].push_back({true, a.data(), count, DataType::kFp32, 1});
      calls[1].push_back({false, b.data(), count, DataType::kFp32, 0});
    }
    return world.run(calls, error);
  };
  std::string error;
  EXPECT_EQ(exchange(1000, 1, &error), ncclSuccess);
  const uint64_t first = world.members[0]->scratchHeld();
  EXPECT_GT(first, 0u);
  EXPECT_EQ(exchange(1000, 1, &error), ncclSuccess);
  EXPECT_EQ(world.members[0]->scratchHeld(), first);
  EXPECT_EQ(exchange(1u << 20, 2, &error), ncclSuccess);
  EXPECT_GT(world.members[0]->scratchHeld(), first);
  // At most twice the limit, with what earlier turns may still use.
  EXPECT_LE(world.members[0]->scratchHeld(), 2 * (3u << 20));
  const int groups = wire.groups;
  EXPECT_EQ(exchange(1u << 20, 3, &error), ncclInvalidUsage);
  EXPECT_NE(error.find("--chunk-bytes"), std::string::npos) << error;
  EXPECT_EQ(wire.groups, groups) << "nothing was sent";
  EXPECT_EQ(exchange(1000, 1, &error), ncclSuccess) << "and what fits goes on";
}

TEST(Messages, AClosedGateStopsBeforeTheRealCall) {
  MessageWorld world(2);
  world.gate.closed = true;
  std::vector<float> a(64, 1.0f), b(64);
  std::string error;
  EXPECT_EQ(
      world.run({{{true, a.data(), 64, DataType::kFp32, 1}}, {{false, b.data(), 64, DataType::kFp32, 0}}},
                &error),
      ncclRemoteError);
  EXPECT_NE(error.find("aborted"), std::string::npos);
  EXPECT_EQ(wire.groups, 0);
}

TEST(Messages, OtherStreamsForkAndJoinAndTurnsFollowEachOther) {
  MessageWorld world(2);
  std::vector<float> a(64, 1.0f), b(64);
  char streams[2];
  Message first{true, a.data(), 64, DataType::kFp32, 1, &streams[0]};
  Message second = first;
  second.stream = &streams[1];
  Message receive{false, b.data(), 64, DataType::kFp32, 0, &streams[0]};
  ASSERT_EQ(world.run({{first, second}, {receive, receive}}), ncclSuccess);
  using Log = std::vector<std::pair<char, StreamHandle>>;
  EXPECT_EQ(world.device.log, (Log{{'r', &streams[1]},
                                   {'w', &streams[0]},
                                   {'r', &streams[0]},
                                   {'w', &streams[1]},
                                   {'r', &streams[0]}}));
  world.device.log.clear();
  ASSERT_EQ(world.run({{second}, {receive}}), ncclSuccess);
  EXPECT_EQ(world.device.log.front(), (std::pair<char, StreamHandle>{'w', &streams[1]}));
}

// Each message has random bits of its own, the mean of many is what was sent, and what is captured is rounded
// to nearest.
TEST(Messages, RoundStochasticallyButInCaptures) {
  constexpr int kTurns = 300;
  MessageWorld world(2, 64u << 20, true);
  const std::vector<float> values = randomFloats(1000, 3);
  std::vector<float> got(values.size()), first;
  std::vector<std::vector<Message>> calls(2);
  auto* data = const_cast<float*>(values.data());
  calls[0] = {{true, data, values.size(), DataType::kFp32, 1}};
  calls[1] = {{false, got.data(), got.size(), DataType::kFp32, 0}};
  std::vector<double> mean(values.size());
  for (int turn = 0; turn < kTurns; ++turn) {
    ASSERT_EQ(world.run(calls), ncclSuccess);
    for (size_t i = 0; i < got.size(); ++i) mean[i] += double{got[i]} / kTurns;
    if (turn == 0) first = got;
    if (turn == 1) EXPECT_NE(got, first);
  }
  const std::vector<float> nearest = rounded(world.format, values);
  double error = 0, of_nearest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (mean[i] - values[i]) * (mean[i] - values[i]);
    of_nearest += (nearest[i] - values[i]) * (nearest[i] - values[i]);
  }
  EXPECT_LT(error, 0.03 * of_nearest);
  world.device.capture = 5;
  ASSERT_EQ(world.run(calls), ncclSuccess);
  EXPECT_EQ(got, nearest);
}

}  // namespace
}  // namespace halfwire
