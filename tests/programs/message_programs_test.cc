// Sends and receives over the wire: an uneven all-to-all as a mixture of experts makes it, pipeline
// neighbours that do not group, and messages too small or too large to be compressed among them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "policy/run_log_json.h"
#include "programs/programs.h"
#include "wire/rounded.h"

namespace halfwire::testing {
namespace {

float valueOf(int from, int to, int round, uint64_t i) {
  return std::sin(static_cast<float>(i % 977) * (1.0f + static_cast<float>(from)) +
                  static_cast<float>(to + round)) *
         std::exp2(static_cast<float>(i / 300 % 9) - 4.0f);
}

std::vector<float> message(int from, int to, int round, uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = valueOf(from, to, round, i);
  return values;
}

// Floor 4 KiB, chunks of 256 KiB: what rank i sends rank j has from 0 bytes to more than a chunk.
uint64_t splitOf(int from, int to) { return static_cast<uint64_t>((from * 7 + to * 5) % 6) * 15013; }

RANK_PROGRAM(UnevenAllToAll) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const int w = rank.ranks(), me = rank.rank();
  for (int round = 0; round < 6; ++round) {
    Rank::note("round", round);
    std::vector<std::vector<float>> out(w), in(w);
    CHECK_NCCL(ncclGroupStart());
    for (int k = 0; k < w; ++k) {
      // Ranks issue theirs in orders of their own.
      const int peer = (me * round + k) % w;
      out[peer] = message(me, peer, round, splitOf(me, peer));
      in[peer].assign(splitOf(peer, me), -7.0f);
      const auto sends = [&] {
        CHECK_NCCL(ncclSend(out[peer].data(), out[peer].size(), ncclFloat32, peer, comm, stream));
      };
      if (k % 2 == 0) sends();
      CHECK_NCCL(ncclRecv(in[peer].data(), in[peer].size(), ncclFloat32, peer, comm, stream));
      if (k % 2 == 1) sends();
    }
    CHECK_NCCL(ncclGroupEnd());
    stream.synchronize();
    for (int peer = 0; peer < w; ++peer) {
      const auto sent = message(peer, me, round, splitOf(peer, me));
      const uint64_t bytes = sent.size() * sizeof(float);
      const bool compressed = bytes >= 4096 && bytes <= 256 * 1024;
      RANK_CHECK(in[peer] == (compressed ? rounded({}, sent) : sent));
    }
  }
  CHECK_NCCL(ncclCommDestroy(comm));
}

// Activations down a pipeline and gradients up it: the ends call one by one, the ranks between in groups,
// several messages to a pair.
RANK_PROGRAM(Pipeline) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const int w = rank.ranks(), me = rank.rank();
  const uint64_t count = 20000;
  constexpr int kMessages = 3;
  for (int round = 0; round < 5; ++round) {
    Rank::note("round", round);
    std::vector<std::vector<float>> down(kMessages), up(kMessages), from_above(kMessages),
        from_below(kMessages);
    for (int i = 0; i < kMessages; ++i) {
      down[i] = message(me, me + 1, round + i, count);
      up[i] = message(me, me - 1, round + i, count);
      from_above[i].assign(count, -7.0f);
      from_below[i].assign(count, -7.0f);
    }
    const bool grouped = me > 0 && me + 1 < w;
    if (grouped) CHECK_NCCL(ncclGroupStart());
    // An even rank first sends down, so that calls one by one meet.
    const auto sendDown = [&] {
      for (int i = 0; me + 1 < w && i < kMessages; ++i)
        CHECK_NCCL(ncclSend(down[i].data(), count, ncclFloat32, me + 1, comm, stream));
    };
    const auto sendUp = [&] {
      for (int i = 0; me > 0 && i < kMessages; ++i)
        CHECK_NCCL(ncclSend(up[i].data(), count, ncclFloat32, me - 1, comm, stream));
    };
    const auto receive = [&](std::vector<std::vector<float>>& into, int peer) {
      for (int i = 0; peer >= 0 && peer < w && i < kMessages; ++i)
        CHECK_NCCL(ncclRecv(into[i].data(), count, ncclFloat32, peer, comm, stream));
    };
    if (me == 0) {
      sendDown();
      receive(from_below, 1);
    } else {
      receive(from_above, me - 1);
      sendUp();
      if (grouped) sendDown();
      if (grouped) receive(from_below, me + 1);
    }
    if (grouped) CHECK_NCCL(ncclGroupEnd());
    stream.synchronize();
    for (int i = 0; i < kMessages; ++i) {
      if (me > 0) RANK_CHECK(from_above[i] == rounded({}, message(me - 1, me, round + i, count)));
      if (me + 1 < w) RANK_CHECK(from_below[i] == rounded({}, message(me + 1, me, round + i, count)));
    }
  }
  CHECK_NCCL(ncclCommDestroy(comm));
}

RANK_PROGRAM(TooManyMessages) {
  const ncclComm_t comm = makeWorld(rank);
  const Stream stream;
  const int me = rank.rank();
  const uint64_t count = 15000;
  std::vector<float> out(count, 1.0f), in(count);
  CHECK_NCCL(ncclGroupStart());
  for (int i = 0; i < 80; ++i) {
    CHECK_NCCL(ncclSend(out.data(), count, ncclFloat32, 1 - me, comm, stream));
    CHECK_NCCL(ncclRecv(in.data(), count, ncclFloat32, 1 - me, comm, stream));
  }
  RANK_CHECK(ncclGroupEnd() == ncclInvalidUsage);
  rank.report("error", ncclGetLastError(comm));
  CHECK_NCCL(ncclCommAbort(comm));
}

class MessagePrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (libraryPath().empty()) GTEST_SKIP() << "libhalfwire.so is not built";
    char name[] = "/tmp/halfwire-message-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  Environment environment(const Environment& more = {}) const {
    return with(with(compressing(), {{"HALFWIRE_OPS", "sendrecv-fp32"},
                                     {"HALFWIRE_MIN_BYTES", "4KiB"},
                                     {"HALFWIRE_CHUNK_BYTES", "256KiB"},
                                     {"HALFWIRE_LOG_DIR", folder_}}),
                more);
  }
  std::string folder_;
};

TEST_F(MessagePrograms, UnevenAllToAllIsRoundedOnceAndHalvesItsBytes) {
  const LaunchOutcome outcome = launchWith("UnevenAllToAll", 3, environment());
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  std::vector<std::string> problems;
  uint64_t compressed = 0, large = 0, small = 0;
  for (const RunLogRecord& record : readRunLogs(folder_, &problems)) {
    for (const RunLogComm& comm : record.communicators) {
      for (const RunLogCall& call : comm.calls) {
        if (call.op != CollectiveOp::kSend) continue;
        if (call.reason == Reason::kMessageTooLarge) large += call.calls;
        if (call.reason == Reason::kBelowFloor || call.reason == Reason::kEmpty) small += call.calls;
        if (call.reason != Reason::kCompressed) continue;
        compressed += call.calls;
        EXPECT_LT(static_cast<double>(call.bytes_sent), 0.27 * static_cast<double>(call.bytes_asked));
        EXPECT_EQ(call.launches, call.calls);
      }
    }
  }
  EXPECT_GT(compressed, 0u);
  EXPECT_GT(large, 0u);
  EXPECT_GT(small, 0u);
  EXPECT_EQ(compressed + large + small, 6u * 9);
}

TEST_F(MessagePrograms, PipelinesThatDoNotGroupAlikeEnd) {
  for (const Environment& more : {Environment{}, Environment{{"HALFWIRE_HOST_HW_QUEUES", "1"}},
                                  Environment{{"HALFWIRE_HOST_DELAY_US", "1500"}}}) {
    const LaunchOutcome outcome = launchWith("Pipeline", 4, environment(more));
    EXPECT_TRUE(outcome.ok()) << outcome.describe();
  }
}

TEST_F(MessagePrograms, MoreThanTheScratchMayHoldIsRefusedWithTheCure) {
  const LaunchOutcome outcome = launchWith("TooManyMessages", 2, environment());
  ASSERT_TRUE(outcome.ok()) << outcome.describe();
  for (const RankOutcome& rank : outcome.ranks)
    EXPECT_NE(rank.reports.at("error").value.find("larger --chunk-bytes"), std::string::npos)
        << rank.reports.at("error").value;
}

}  // namespace
}  // namespace halfwire::testing
