// Compressed collectives of all ranks in one thread, with the scalar reference as the oracle.
#include "collective/compressor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "collective/test_world.h"

namespace halfwire {
namespace {

// What the wire makes of inputs: quantized as the documentation says, summed by the reference.
std::vector<float> expected(const WireFormat& f, const std::vector<std::vector<float>>& inputs,
                            uint64_t offset, uint64_t count, bool average, bool two_roundings) {
  const auto ranks = static_cast<uint32_t>(inputs.size());
  const uint64_t bytes = packetBytes(f, count);
  std::vector<char> packets(bytes * ranks + 16), sum(bytes + 16);
  for (uint32_t r = 0; r < ranks; ++r) {
    QuantizeJob q;
    q.format = f;
    q.type = DataType::kFp32;
    q.in = inputs[r].data() + offset;
    q.in_total = q.in_pitch = q.segment_elements = count;
    q.out = packets.data() + r * bytes;
    reference::quantize(q);
  }
  std::vector<float> out(count);
  ReduceJob j;
  j.format = f;
  j.type = DataType::kFp32;
  j.packets = ranks;
  j.in = packets.data();
  j.in_pitch = bytes;
  j.average = average ? 1.0f / static_cast<float>(ranks) : 1.0f;
  j.elements = count;
  j.to_packet = two_roundings;
  j.out = two_roundings ? static_cast<void*>(sum.data()) : out.data();
  reference::reduce(j);
  if (!two_roundings) return out;
  DequantizeJob d;
  d.format = f;
  d.type = DataType::kFp32;
  d.in = sum.data();
  d.segment_elements = d.out_total = d.out_pitch = count;
  d.out = out.data();
  reference::dequantize(d);
  return out;
}

using Shape = std::tuple<uint32_t, uint64_t, uint64_t>;  // ranks, count, chunk bytes
class CompressorShapes : public testing::TestWithParam<Shape> {};

TEST_P(CompressorShapes, AllReduceEqualsTheReferenceOnEveryRank) {
  const auto [ranks, count, chunk] = GetParam();
  const WireFormat format;
  World world(ranks, format, chunk);
  std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(count, -7.0f));
  std::vector<std::vector<CompressedCall>> calls(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    in[r] = randomFloats(count, r + 1);
    CompressedCall call{CollectiveOp::kAllReduce, in[r].data(), out[r].data(), count, DataType::kFp32, true};
    calls[r] = {call};
  }
  const auto turns = world.run(calls);
  const auto want = expected(format, in, 0, count, true, ranks != 2);
  for (uint32_t r = 0; r < ranks; ++r) {
    EXPECT_EQ(std::memcmp(out[r].data(), want.data(), count * 4), 0) << "rank " << r;
    EXPECT_LE(turns[r].stats[0].launches, 4 * ((count * 4 + chunk - 1) / chunk + 1));
  }
  uint64_t sent = 0;
  for (const auto& t : turns) sent += t.stats[0].sent_bytes;
  EXPECT_EQ(sent, wire.bytes);
}

TEST_P(CompressorShapes, ReduceScatterEqualsTheReference) {
  const auto [ranks, count, chunk] = GetParam();
  const WireFormat format{ElementFormat::kInt8, ScaleFormat::kE8M0, 64};
  World world(ranks, format, chunk);
  std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(count, -7.0f));
  std::vector<std::vector<CompressedCall>> calls(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    in[r] = randomFloats(count * ranks, r + 1);
    calls[r] = {CompressedCall{CollectiveOp::kReduceScatter, in[r].data(), out[r].data(), count,
                               DataType::kFp32, false}};
  }
  world.run(calls);
  for (uint32_t r = 0; r < ranks; ++r) {
    const auto want = expected(format, in, r * count, count, false, false);
    EXPECT_EQ(std::memcmp(out[r].data(), want.data(), count * 4), 0) << "rank " << r;
  }
}

TEST_P(CompressorShapes, AllGatherInPlaceRoundsEveryRankAlike) {
  const auto [ranks, count, chunk] = GetParam();
  const WireFormat format;
  World world(ranks, format, chunk);
  std::vector<std::vector<float>> buffer(ranks);
  std::vector<std::vector<CompressedCall>> calls(ranks);
  std::vector<float> want;
  for (uint32_t r = 0; r < ranks; ++r) {
    buffer[r].assign(count * ranks, -7.0f);
    const auto mine = randomFloats(count, r + 1);
    std::copy(mine.begin(), mine.end(), buffer[r].begin() + static_cast<long>(r * count));
    const auto rounded = expected(format, {mine}, 0, count, false, false);
    want.insert(want.end(), rounded.begin(), rounded.end());
    calls[r] = {CompressedCall{CollectiveOp::kAllGather, buffer[r].data() + r * count, buffer[r].data(),
                               count, DataType::kFp32, false}};
  }
  world.run(calls);
  for (uint32_t r = 0; r < ranks; ++r)
    EXPECT_EQ(std::memcmp(buffer[r].data(), want.data(), want.size() * 4), 0) << r;
}

// What moves data: each part is its sender's, rounded once, wherever it ends up, and nothing else is written.
TEST_P(CompressorShapes, MovesEqualTheReferenceOnEveryRank) {
  const auto [ranks, count, chunk] = GetParam();
  const WireFormat format{ElementFormat::kE4M3, ScaleFormat::kFp32, 64};
  for (const CollectiveOp op :
       {CollectiveOp::kAlltoAll, CollectiveOp::kBroadcast, CollectiveOp::kGather, CollectiveOp::kScatter}) {
    for (uint32_t root = 0; root < (op == CollectiveOp::kAlltoAll ? 1 : ranks); ++root) {
      World world(ranks, format, chunk);
      const uint64_t parts = op == CollectiveOp::kBroadcast ? 1 : ranks;
      std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(count * parts, -7.0f)),
          want = out;
      std::vector<std::vector<CompressedCall>> calls(ranks);
      const auto part = [&](uint32_t rank, uint64_t index) {
        return expected(format, {in[rank]}, index * count, count, false, false);
      };
      const auto place = [&](uint32_t rank, uint64_t index, const std::vector<float>& values) {
        std::copy(values.begin(), values.end(), want[rank].begin() + static_cast<long>(index * count));
      };
      for (uint32_t r = 0; r < ranks; ++r) {
        in[r] = randomFloats(count * parts, r + 1);
        const bool sends = op == CollectiveOp::kAlltoAll || op == CollectiveOp::kGather || r == root;
        const bool receives = op != CollectiveOp::kGather || r == root;
        calls[r] = {CompressedCall{op,
                                   sends ? in[r].data() : nullptr,
                                   receives ? out[r].data() : nullptr,
                                   count,
                                   DataType::kFp32,
                                   false,
                                   {},
                                   nullptr,
                                   root}};
      }
      for (uint32_t r = 0; r < ranks; ++r) {
        if (op == CollectiveOp::kBroadcast) place(r, 0, part(root, 0));
        if (op == CollectiveOp::kScatter) place(r, 0, part(root, r));
        if (op == CollectiveOp::kGather && r == root)
          for (uint32_t from = 0; from < ranks; ++from) place(r, from, part(from, 0));
        if (op == CollectiveOp::kAlltoAll)
          for (uint32_t from = 0; from < ranks; ++from) place(r, from, part(from, r));
      }
      const auto turns = world.run(calls);
      for (uint32_t r = 0; r < ranks; ++r) {
        EXPECT_EQ(std::memcmp(out[r].data(), want[r].data(), want[r].size() * 4), 0)
            << opName(op) << " rank " << r << " root " << root;
      }
      uint64_t sent = 0;
      for (const auto& t : turns) sent += t.stats[0].sent_bytes;
      EXPECT_EQ(sent, wire.bytes) << opName(op);
    }
  }
}

TEST_P(CompressorShapes, InPlaceMovesReadBeforeTheyWrite) {
  const auto [ranks, count, chunk] = GetParam();
  for (const CollectiveOp op : {CollectiveOp::kAlltoAll, CollectiveOp::kBroadcast, CollectiveOp::kGather,
                                CollectiveOp::kScatter, CollectiveOp::kReduce}) {
    std::vector<std::vector<std::vector<float>>> results;
    for (const bool in_place : {false, true}) {
      World world(ranks, {}, chunk);
      const uint64_t parts = op == CollectiveOp::kBroadcast || op == CollectiveOp::kReduce ? 1 : ranks;
      std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(count * parts));
      std::vector<std::vector<CompressedCall>> calls(ranks);
      for (uint32_t r = 0; r < ranks; ++r) {
        in[r] = randomFloats(count * parts, r + 1);
        const float* send = in[r].data();
        float* recv = out[r].data();
        const uint64_t own = r * count;
        if (op == CollectiveOp::kGather) send += own;
        if (in_place) recv = in[r].data() + (op == CollectiveOp::kScatter ? own : 0);
        calls[r] = {CompressedCall{op, send, recv, count, DataType::kFp32, true, {}, nullptr, 1}};
      }
      world.run(calls);
      results.emplace_back();
      for (uint32_t r = 0; r < ranks; ++r) {
        const bool has = (op != CollectiveOp::kGather && op != CollectiveOp::kReduce) || r == 1;
        const auto* from = static_cast<const float*>(calls[r][0].recv);
        const uint64_t n = op == CollectiveOp::kScatter ? count : count * parts;
        results.back().emplace_back(has ? std::vector<float>(from, from + n) : std::vector<float>());
      }
    }
    EXPECT_EQ(results[0], results[1]) << opName(op);
  }
}

TEST_P(CompressorShapes, ReduceGivesTheRootWhatAllReduceGivesAll) {
  const auto [ranks, count, chunk] = GetParam();
  for (uint32_t root = 0; root < ranks; ++root) {
    World world(ranks, {}, chunk);
    std::vector<std::vector<float>> in(ranks), all(ranks, std::vector<float>(count)),
        one(ranks, std::vector<float>(count, -7.0f));
    std::vector<std::vector<CompressedCall>> calls(ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      in[r] = randomFloats(count, r + 1);
      calls[r] = {{CollectiveOp::kAllReduce, in[r].data(), all[r].data(), count, DataType::kFp32, true},
                  {CollectiveOp::kReduce,
                   in[r].data(),
                   r == root ? one[r].data() : nullptr,
                   count,
                   DataType::kFp32,
                   true,
                   {},
                   nullptr,
                   root}};
    }
    world.run(calls);
    for (uint32_t r = 0; r < ranks; ++r)
      EXPECT_EQ(one[r], r == root ? all[0] : std::vector<float>(count, -7.0f)) << "rank " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CompressorShapes,
                         testing::Combine(testing::Values(2u, 3u, 5u),
                                          testing::Values(1u, 127u, 129u, 1000u, 5000u),
                                          testing::Values(1024u, 4096u, 1u << 20)));

TEST(Compressor, BitsDoNotDependOnChunksOrOnTheGroup) {
  const uint32_t ranks = 3;
  const uint64_t count = 4001;
  std::vector<std::vector<float>> results;
  for (const uint64_t chunk : {1024ull, 2048ull, 1ull << 20}) {
    for (const int copies : {1, 5}) {
      World world(ranks, {}, chunk);
      std::vector<std::vector<float>> in(ranks);
      std::vector<std::vector<std::vector<float>>> out(
          ranks, std::vector<std::vector<float>>(copies, std::vector<float>(count)));
      std::vector<std::vector<CompressedCall>> calls(ranks);
      for (uint32_t r = 0; r < ranks; ++r) {
        in[r] = randomFloats(count, r + 1);
        for (int i = 0; i < copies; ++i) {
          calls[r].push_back(
              {CollectiveOp::kAllReduce, in[r].data(), out[r][i].data(), count, DataType::kFp32, false});
        }
      }
      world.run(calls);
      for (const auto& rank : out) {
        for (const auto& v : rank) results.push_back(v);
      }
    }
  }
  for (const auto& v : results) EXPECT_EQ(std::memcmp(v.data(), results[0].data(), count * 4), 0);
}

// Noise: the exact result and nothing but one ulp of bf16, equal on all ranks, another one in every call.
TEST(Compressor, NoisePerturbsExactResultsAlikeOnAllRanks) {
  const uint32_t ranks = 3;
  World world(ranks, {}, 1u << 20, true);
  EXPECT_EQ(world.members[0]->scratchHeld(), 0u);
  std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(3000)),
      part(ranks, std::vector<float>(1000));
  std::vector<float> sum(3000);
  for (uint32_t r = 0; r < ranks; ++r) {
    in[r] = randomFloats(3000, r + 1);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += in[r][i];
  }
  const auto oneUlp = [](float got, float want) {
    return got != want && std::abs(got - want) <= std::abs(want) / 64;
  };
  std::vector<float> before;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<std::vector<CompressedCall>> calls(ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      calls[r] = {{CollectiveOp::kAllReduce, in[r].data(), out[r].data(), 3000, DataType::kFp32, true},
                  {CollectiveOp::kReduceScatter, in[r].data(), part[r].data(), 1000, DataType::kFp32, false}};
    }
    const auto turns = world.run(calls);
    EXPECT_EQ(turns[0].stats[0].launches, 1u);
    EXPECT_EQ(turns[0].stats[0].sent_bytes, 0u);  // NCCL's own algorithm sends
    EXPECT_NE(out[0], before);
    before = out[0];
    for (uint32_t r = 0; r < ranks; ++r) {
      EXPECT_EQ(out[r], out[0]);
      for (size_t i = 0; i < sum.size(); ++i) ASSERT_TRUE(oneUlp(out[r][i], sum[i] / ranks)) << i;
      for (size_t i = 0; i < 1000; ++i) ASSERT_TRUE(oneUlp(part[r][i], sum[r * 1000 + i])) << i;
    }
  }
  EXPECT_EQ(wire.groups, 2);
}

TEST(Compressor, TwoHundredSmallCallsShareTwoGroups) {
  const uint32_t ranks = 4;
  World world(ranks, {}, 32u << 20);
  std::vector<std::vector<float>> data(ranks, std::vector<float>(200 * 256, 1.0f));
  std::vector<std::vector<CompressedCall>> calls(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    for (int i = 0; i < 200; ++i) {
      float* p = data[r].data() + i * 256;
      calls[r].push_back({CollectiveOp::kAllReduce, p, p, 256, DataType::kFp32, false});
    }
  }
  world.run(calls);
  EXPECT_EQ(wire.groups, 2);
  for (const auto& v : data) {
    for (const float x : v) ASSERT_EQ(x, 4.0f);
  }
}

TEST(Compressor, OtherStreamsForkAndJoin) {
  World world(2, {}, 1u << 20);
  std::vector<float> a(64, 1.0f), b(64, 1.0f);
  const StreamHandle s1 = &a, s2 = &b;
  const auto call = [&](std::vector<float>& v, StreamHandle s) {
    CompressedCall c{CollectiveOp::kAllReduce, v.data(), v.data(), 64, DataType::kFp32, false};
    c.stream = s;
    return c;
  };
  std::vector<float> a1(64, 1.0f), b1(64, 1.0f);
  std::vector<CompressedCall> calls0{call(a, s1), call(b, s2)}, calls1{call(a1, s1), call(b1, s2)};
  world.run({calls0, calls1});
  // Each member: s2 recorded, s1 waits; at the end s1 recorded, s2 waits.
  const std::vector<std::pair<char, StreamHandle>> want{{'r', s2}, {'w', s1}, {'r', s2}, {'w', s1},
                                                        {'r', s1}, {'w', s2}, {'r', s1}, {'w', s2}};
  EXPECT_EQ(world.device.log, want);
  // The next use on another stream waits for the scratch.
  world.device.log.clear();
  world.run({{call(a, s2)}, {call(a1, s2)}});
  EXPECT_EQ(world.device.log.front(), (std::pair<char, StreamHandle>{'w', s2}));
}

// Letters of the log: records and waits in a stream's order; 'R' and 'W' for what each run of a graph does.
// Both members begin, then each ends.
TEST(Compressor, GraphsAndTurnsOutsideThemTakeTheScratchInTurn) {
  World world(2, {}, 1u << 20);
  std::vector<float> a(64, 1.0f), b(64, 1.0f);
  char streams[2];
  const auto run = [&](uint64_t capture, int stream) {
    world.device.capture = capture;
    world.device.log.clear();
    CompressedCall call{CollectiveOp::kAllReduce, a.data(), a.data(), 64, DataType::kFp32, false};
    call.stream = &streams[stream];
    CompressedCall other = call;
    other.send = other.recv = b.data();
    world.run({{call}, {other}});
    std::string letters;
    for (const auto& [letter, on] : world.device.log) {
      EXPECT_EQ(on, call.stream);
      letters += letter;
    }
    return letters;
  };
  EXPECT_EQ(run(0, 0), "rr");
  EXPECT_EQ(run(7, 0), "WWrRrR") << "a graph is behind whatever will have run";
  EXPECT_EQ(run(7, 0), "rRrR") << "in its capture, the stream's own order does";
  EXPECT_EQ(run(7, 1), "wwrRrR");
  EXPECT_EQ(run(8, 1), "WWrRrR") << "another graph";
  EXPECT_EQ(run(0, 0), "wwrr") << "a graph may have run on any stream since";
  EXPECT_EQ(run(0, 0), "wwrr");
}

TEST(Compressor, AClosedGateStopsBeforeTheRealCall) {
  World world(2, {}, 1u << 20);
  world.gate.closed = true;
  std::vector<float> a(64, 1.0f);
  std::vector<CompressedCall> calls{
      {CollectiveOp::kAllReduce, a.data(), a.data(), 64, DataType::kFp32, false}};
  CompressedTurn turn;
  turn.compressor = world.members[0].get();
  turn.calls = calls;
  std::string error;
  EXPECT_EQ(runCompressed({&turn, 1}, world.gate, &error), ncclRemoteError);
  EXPECT_NE(error.find("aborted"), std::string::npos);
  EXPECT_EQ(wire.groups, 0);
}

TEST(Compressor, ConnectingReachesEveryPairAndGathers) {
  World world(4, {}, 1u << 20);
  std::vector<Compressor*> members;
  for (const auto& m : world.members) members.push_back(m.get());
  std::string error;
  ASSERT_EQ(connectPeers(members, world.gate, &error), ncclSuccess) << error;
  EXPECT_EQ(wire.groups, 2);
  EXPECT_GE(wire.bytes, 2u * 4 * 3);
  EXPECT_FALSE(wire.broken);
}

TEST(Compressor, SmallerChunksTakeASmallerScratchIfThereIsRoomForIt) {
  for (const bool full : {false, true}) {
    World world(2, {}, 4u << 20);
    const uint64_t large = world.members[0]->scratchHeld();
    world.device.full = full;
    for (const auto& m : world.members) {
      m->useChunks(1u << 20);
      EXPECT_EQ(m->config().chunk_bytes, 1u << 20);
      EXPECT_EQ(m->scratchHeld(), full ? large : Compressor::scratchBytes(m->config()));
      m->useChunks(8u << 20);
      EXPECT_EQ(m->config().chunk_bytes, 1u << 20);
    }
    EXPECT_LT(Compressor::scratchBytes(world.members[0]->config()), large / 3);
    std::vector<float> a(1u << 20, 1.0f), b(1u << 20, 2.0f);
    world.run({{{CollectiveOp::kAllReduce, a.data(), a.data(), a.size(), DataType::kFp32, false}},
               {{CollectiveOp::kAllReduce, b.data(), b.data(), b.size(), DataType::kFp32, false}}});
    EXPECT_EQ(wire.groups, 2);  // four passes, two of which fill the scratch: fp32 has half the elements
    EXPECT_EQ(a.front(), 3.0f);
    EXPECT_EQ(b.back(), 3.0f);
  }
}

TEST(Compressor, ScratchIsBoundedWhateverTheMessage) {
  Compressor::Config config{nullptr, 0, 8, {}, 32u << 20};
  EXPECT_LE(Compressor::scratchBytes(config), (32u << 20) * 52 / 50 + (1u << 20));
  config.ranks = 2;
  EXPECT_LE(Compressor::scratchBytes(config), (32u << 20) * 52 / 50 + (1u << 20));
}

// Of many calls the mean is the sum; each call has bits of its own, the same on every rank and however the
// message is cut; what is captured is rounded to nearest.
TEST(Compressor, StochasticRoundingIsUnbiasedAndEqualOnEveryRank) {
  constexpr uint64_t kCount = 3000;
  constexpr int kCalls = 400;
  const WireFormat format;
  for (const uint32_t ranks : {2u, 4u}) {
    World world(ranks, format, 1 << 20, false, true);
    std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(kCount));
    std::vector<std::vector<CompressedCall>> calls(ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      in[r] = randomFloats(kCount, r + 1);
      calls[r] = {{CollectiveOp::kAllReduce, in[r].data(), out[r].data(), kCount, DataType::kFp32, false}};
    }
    std::vector<double> mean(kCount);
    std::vector<std::vector<float>> results;
    for (int k = 0; k < kCalls; ++k) {
      world.run(calls);
      for (uint32_t r = 1; r < ranks; ++r) ASSERT_EQ(out[r], out[0]) << "call " << k << " rank " << r;
      for (uint64_t i = 0; i < kCount; ++i) mean[i] += double{out[0][i]} / kCalls;
      if (k < 3) results.push_back(out[0]);
    }
    EXPECT_NE(results[0], results[1]);
    const std::vector<float> nearest = expected(format, in, 0, kCount, false, ranks != 2);
    double error = 0, of_nearest = 0, squares = 0;
    for (uint64_t i = 0; i < kCount; ++i) {
      double exact = 0;
      for (uint32_t r = 0; r < ranks; ++r) exact += in[r][i];
      error += (mean[i] - exact) * (mean[i] - exact);
      of_nearest += (nearest[i] - exact) * (nearest[i] - exact);
      squares += exact * exact;
    }
    // Nearest always misses by the same; here the misses of 400 calls cancel to about a twentieth of one's.
    EXPECT_LT(std::sqrt(error / squares), 0.15 * std::sqrt(of_nearest / squares));

    World cut(ranks, format, 4096, false, true);
    for (int k = 0; k < 3; ++k) {
      cut.run(calls);
      EXPECT_EQ(out[0], results[static_cast<size_t>(k)]) << "cut into passes, call " << k;
    }
    cut.device.capture = 5;
    cut.run(calls);
    EXPECT_EQ(out[0], nearest);
    cut.device.capture = 0;
    cut.run(calls);
    EXPECT_NE(out[0], nearest);
  }
}

// Two calls of one operation on all ranks; by rank and call what they gave.
std::vector<std::vector<float>> twoCalls(World* world, CollectiveOp op, uint64_t count, bool grouped) {
  const auto ranks = static_cast<uint32_t>(world->members.size());
  const bool whole =
      op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduce || op == CollectiveOp::kBroadcast;
  const uint64_t size = count * (whole ? 1 : ranks);
  std::vector<std::vector<float>> in, out(2 * ranks, std::vector<float>(size, -7.0f));
  std::vector<std::vector<CompressedCall>> calls(ranks);
  for (uint32_t i = 0; i < 2 * ranks; ++i) in.push_back(randomFloats(size, i + 1));
  for (uint32_t i = 0; i < 2 * ranks; ++i) {
    CompressedCall call{op, in[i].data(), out[i].data(), count, DataType::kFp32, false};
    call.root = 1;
    calls[i % ranks].push_back(call);
  }
  if (grouped) {
    world->run(calls);
    return out;
  }
  for (size_t k = 0; k < 2; ++k) {
    std::vector<std::vector<CompressedCall>> one;
    for (const auto& each : calls) one.push_back({each[k]});
    world->run(one);
  }
  return out;
}

// The random bits follow from an element's place and its call's number, whatever passes, slots and groups it
// goes through, in every operation.
TEST(Compressor, HowStochasticMessagesAreCutOrGroupedChangesNothing) {
  for (const CollectiveOp op : {CollectiveOp::kAllReduce, CollectiveOp::kReduce, CollectiveOp::kReduceScatter,
                                CollectiveOp::kAllGather, CollectiveOp::kBroadcast, CollectiveOp::kAlltoAll,
                                CollectiveOp::kGather, CollectiveOp::kScatter}) {
    for (const uint32_t ranks : {2u, 3u}) {
      const uint64_t count = 5001;
      World whole(ranks, {}, 1 << 20, false, true), cut(ranks, {}, 4096, false, true),
          slots(ranks, {}, 1 << 20, false, true, true), nearest(ranks, {}, 1 << 20);
      // Twice: a group must leave as many numbers behind as it has calls.
      for (int turn = 0; turn < 2; ++turn) {
        const auto want = twoCalls(&whole, op, count, false);
        EXPECT_EQ(twoCalls(&cut, op, count, false), want) << opName(op) << " in passes, ranks " << ranks;
        EXPECT_EQ(twoCalls(&slots, op, count, true), want) << opName(op) << " in slots, ranks " << ranks;
        EXPECT_EQ(twoCalls(&nearest, op, count, true) == want, false) << opName(op);
      }
    }
  }
}

// What noise a call gets follows from its number, also where a rounding is asked for that has no part in it.
TEST(Compressor, NoiseDoesNotDependOnGroupsOrRounding) {
  World single(2, {}, 1 << 20, true), together(2, {}, 1 << 20, true), rounding(2, {}, 1 << 20, true, true);
  const auto want = twoCalls(&single, CollectiveOp::kAllReduce, 3000, false);
  EXPECT_EQ(twoCalls(&together, CollectiveOp::kAllReduce, 3000, true), want);
  EXPECT_EQ(twoCalls(&rounding, CollectiveOp::kAllReduce, 3000, true), want);
}

}  // namespace
}  // namespace halfwire
