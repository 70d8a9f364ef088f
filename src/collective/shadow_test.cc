// Shadows of all ranks in one thread: what they sample, that the program's results stay what they were, and
// that the figures are those of the compressed collective itself.
#include "collective/shadow.h"

#include <gtest/gtest.h>

#include "collective/test_world.h"

namespace halfwire {
namespace {

struct ShadowWorld {
  ShadowWorld(uint32_t ranks, Shadow::Config config) : api(fakeApi()) {
    wire = {};
    for (uint32_t r = 0; r < ranks; ++r) {
      config.compressor.comm = commOf(r);
      config.compressor.rank = r;
      config.compressor.ranks = ranks;
      auto made = Shadow::create(&api, &device, config);
      EXPECT_TRUE(made.ok()) << made.status().message();
      members.push_back(std::move(made).value());
    }
  }

  // One group of the same calls on every rank; `calls[r][i]`. True if all were sampled alike.
  std::vector<bool> group(const std::vector<std::vector<CompressedCall>>& calls) {
    std::vector<bool> sampled;
    api.ncclGroupStart();
    for (size_t i = 0; i < calls[0].size(); ++i) {
      for (size_t r = 0; r < members.size(); ++r) {
        const CompressedCall& c = calls[r][i];
        const bool take = members[r]->samples(c);
        if (r == 0) sampled.push_back(take);
        EXPECT_EQ(take, sampled.back()) << "rank " << r;
        if (take) EXPECT_TRUE(members[r]->keep(c).ok());
        const auto reduce = c.op == CollectiveOp::kAllReduce ? api.ncclAllReduce : api.ncclReduceScatter;
        reduce(c.send, c.recv, c.count, ncclFloat32, c.average ? ncclAvg : ncclSum,
               commOf(static_cast<uint32_t>(r)), nullptr);
      }
    }
    api.ncclGroupEnd();
    std::vector<Shadow*> all;
    for (const auto& m : members) all.push_back(m.get());
    std::string error;
    EXPECT_EQ(runShadows(all, gate, &error), ncclSuccess) << error;
    EXPECT_FALSE(wire.broken);
    return sampled;
  }

  NcclApi api;
  ImmediateDevice device;
  OpenGate gate;
  std::vector<std::unique_ptr<Shadow>> members;
};

Shadow::Config config(std::vector<WireFormat> formats, uint64_t bytes, uint32_t every) {
  Shadow::Config c;
  c.compressor.format = formats.front();
  c.compressor.chunk_bytes = 1u << 16;
  c.formats = std::move(formats);
  c.bytes = bytes;
  c.every = every;
  return c;
}

CompressedCall allReduce(std::vector<float>& v) {
  return {CollectiveOp::kAllReduce, v.data(), v.data(), v.size(), DataType::kFp32, false};
}

TEST(Shadow, InPlaceResultsStayExactAndFiguresAreThoseOfTheCompressedCall) {
  for (const uint32_t ranks : {2u, 3u}) {
    ShadowWorld world(ranks, config({WireFormat{}}, 1u << 20, 1));
    std::vector<std::vector<float>> data(ranks);
    std::vector<float> sum(30000);
    for (uint32_t r = 0; r < ranks; ++r) {
      data[r] = randomFloats(sum.size(), r + 1);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += data[r][i];
    }
    std::vector<std::vector<float>> compressed = data;
    std::vector<std::vector<CompressedCall>> calls;
    for (auto& d : data) calls.push_back({allReduce(d)});
    EXPECT_EQ(world.group(calls), std::vector<bool>{true});
    for (const auto& d : data) EXPECT_EQ(d, sum);

    World alone(ranks, WireFormat{}, 1u << 16);
    std::vector<std::vector<CompressedCall>> same;
    for (auto& d : compressed) same.push_back({allReduce(d)});
    alone.run(same);
    ErrorSums want;
    compare({DataType::kFp32, sum.data(), compressed[0].data(), sum.size(), &want});
    for (const auto& m : world.members) {
      const std::vector<ShadowSample> samples = m->collect();
      ASSERT_EQ(samples.size(), 1u);
      EXPECT_EQ(samples[0].count, sum.size());
      EXPECT_EQ(samples[0].sums.error_squares, want.error_squares);
      EXPECT_EQ(samples[0].sums.elements, want.elements);
      EXPECT_GT(want.error_squares, 0);
      EXPECT_EQ(samples[0].compressed_ms, 1.5);
      EXPECT_TRUE(m->collect().empty());
    }
  }
}

TEST(Shadow, ReduceScatterLooksAtTheRanksOwnPart) {
  const uint32_t ranks = 4;
  ShadowWorld world(ranks, config({WireFormat{}}, 1u << 20, 1));
  std::vector<std::vector<float>> in(ranks), out(ranks, std::vector<float>(5000));
  std::vector<std::vector<CompressedCall>> calls(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    in[r] = randomFloats(5000 * ranks, r + 1);
    calls[r] = {{CollectiveOp::kReduceScatter, in[r].data(), out[r].data(), 5000, DataType::kFp32, true}};
  }
  world.group(calls);
  for (const auto& m : world.members) {
    const auto samples = m->collect();
    ASSERT_EQ(samples.size(), 1u);
    EXPECT_EQ(samples[0].sums.elements, 5000u);
    EXPECT_NEAR(errorFigures(samples[0].sums).relative_rms, 0.0258, 0.002);
  }
}

TEST(Shadow, SamplesByNumberAndSizeAndTakesEveryFormatForEveryCall) {
  const std::vector<WireFormat> formats{{ElementFormat::kE4M3},
                                        {ElementFormat::kInt8, ScaleFormat::kFp32, 32}};
  ShadowWorld world(2, config(formats, 40000, 3));
  std::vector<std::vector<float>> small(2, std::vector<float>(1000, 1.0f)),
      large(2, std::vector<float>(10001, 1.0f));
  std::vector<bool> sampled;
  for (int i = 0; i < 12; ++i) {
    auto& data = i == 6 ? large : small;  // the third to be sampled is too large
    const auto now = world.group({{allReduce(data[0])}, {allReduce(data[1])}});
    sampled.push_back(now[0]);
  }
  EXPECT_EQ(sampled, (std::vector<bool>{1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(world.members[0]->collect().size(), 3u);
  // A program of two calls a step: each meets both formats, whatever the period.
  std::map<std::pair<uint64_t, ElementFormat>, int> met;
  std::vector<std::vector<float>> other(2, std::vector<float>(2000, 1.0f));
  for (int i = 0; i < 240; ++i) {
    auto& data = i % 2 == 0 ? small : other;
    world.group({{allReduce(data[0])}, {allReduce(data[1])}});
    for (const auto& s : world.members[0]->collect()) ++met[{s.count, s.format.element}];
    (void)world.members[1]->collect();
  }
  EXPECT_EQ(met.size(), 4u);
  for (const auto& [kind, times] : met) EXPECT_GT(times, 8);
}

TEST(Shadow, SeveralCallsOfOneGroupAndRefusalWhereTheyExceedTheBuffers) {
  ShadowWorld world(2, config({WireFormat{}}, 16384, 1));
  std::vector<std::vector<float>> a{randomFloats(1000, 1), randomFloats(1000, 2)};
  auto b = a, c = a;
  world.group({{allReduce(a[0]), allReduce(b[0]), allReduce(c[0])},
               {allReduce(a[1]), allReduce(b[1]), allReduce(c[1])}});
  const auto samples = world.members[1]->collect();
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(samples[0].sums.error_squares, samples[2].sums.error_squares);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(world.members[0]->keep(allReduce(a[0])).ok());
  const Status full = world.members[0]->keep(allReduce(a[0]));
  EXPECT_NE(full.message().find("--shadow-bytes"), std::string::npos);
}

TEST(Shadow, WhatNobodyReadsIsCountedAndStillRuns) {
  ShadowWorld world(2, config({WireFormat{}}, 16384, 1));
  std::vector<std::vector<float>> a{randomFloats(1000, 1), randomFloats(1000, 2)};
  world.device.busy = true;
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(world.group({{allReduce(a[0])}, {allReduce(a[1])}})[0]);
    EXPECT_TRUE(world.members[0]->collect().empty());
  }
  EXPECT_EQ(world.members[0]->unread(), 8u);
  world.device.busy = false;
  EXPECT_EQ(world.members[0]->finish().size(), 32u);
  world.group({{allReduce(a[0])}, {allReduce(a[1])}});
  EXPECT_EQ(world.members[0]->collect().size(), 1u);
}

TEST(Shadow, SmallestChangesOfTheBuffersShow) {
  // A result that the compressed run did not write would be seen: its buffer holds what allocate leaves
  // there.
  ShadowWorld world(2, config({WireFormat{}}, 16384, 1));
  std::vector<std::vector<float>> zero(2, std::vector<float>(1000));
  world.group({{allReduce(zero[0])}, {allReduce(zero[1])}});
  const auto samples = world.members[0]->collect();
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].sums.error_squares, 0);
  EXPECT_EQ(samples[0].sums.elements, 1000u);
}

}  // namespace
}  // namespace halfwire
