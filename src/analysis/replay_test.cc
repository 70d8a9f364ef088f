#include "analysis/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "trace/timeline_builder.h"

namespace halfwire::analysis {
namespace {

using trace::ActivityKind;
using trace::CallKind;
using trace::Timeline;

// A training step as a model with known answers: layers of compute on one stream, a collective for each on
// another that waits for its layer, and an optimizer that waits for the last collective. The device waits for
// launches as real ones do.
struct Model {
  int layers = 4;
  int steps = 3;
  std::vector<int64_t> compute;
  std::vector<int64_t> comm;
  int64_t optimizer = 400;
  int64_t launch = 20;  // host time of one launch call
  int64_t think = 30;   // host time between calls
  bool syncs = true;    // the host waits for the step's end
};

struct Built {
  Timeline timeline;
  int64_t span = 0;
};

Built build(const Model& m, double scale) {
  Built b;
  Timeline& t = b.timeline;
  t.streams = {{0, 7}, {0, 20}};
  t.threads.push_back({1, 1, {}, {}});
  const uint32_t gemm = t.names.intern("gemm");
  const uint32_t reduce = t.names.intern("ncclDevKernel_AllReduce_Sum_f16(x)");
  int64_t host = 1000;
  int64_t free[2] = {0, 0};
  int64_t correlation = 0;
  const auto call = [&](CallKind kind, int64_t duration) {
    t.calls.push_back({host, host + duration, ++correlation, 0, 0, kind});
    host += duration + m.think;
    return t.calls.size() - 1;
  };
  const auto kernel = [&](int stream, int64_t duration, uint32_t name, int64_t after) {
    const size_t launched = call(CallKind::kLaunch, m.launch);
    trace::Activity a;
    a.start_ns = std::max({free[stream], after, t.calls[launched].start_ns + 10});
    a.end_ns = a.start_ns + duration;
    a.stream = stream;
    a.name = name;
    a.correlation = correlation;
    free[stream] = a.end_ns;
    t.activities.push_back(a);
    return a.end_ns;
  };
  const auto wait = [&](int waiting, int source) {
    call(CallKind::kEventRecord, 2);
    const int64_t record = correlation;
    call(CallKind::kStreamWait, 2);
    t.waits.push_back({t.calls.back().start_ns, waiting, source, record, correlation});
  };
  for (int s = 0; s < m.steps; ++s) {
    t.steps.push_back({s, host, 0});
    for (int l = 0; l < m.layers; ++l) {
      const int64_t done = kernel(0, m.compute[l], gemm, 0);
      wait(1, 0);
      kernel(1, static_cast<int64_t>(static_cast<double>(m.comm[l]) * scale), reduce, done);
    }
    wait(0, 1);
    const int64_t done = kernel(0, m.optimizer, gemm, free[1]);
    if (m.syncs) {
      const size_t sync = call(CallKind::kSync, 0);
      host -= m.think;
      host = std::max(host, done);
      t.calls[sync].end_ns = host;
      host += m.think;
    }
    t.steps.back().end_ns = host;
  }
  EXPECT_TRUE(trace::finishTimeline(&t, trace::CommPatterns::create({}).value()).ok());
  b.span = std::max(free[0], free[1]) - t.activities.front().start_ns;
  return b;
}

TEST(Replay, WhatIfIsExactWhereTheAnswerIsKnown) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    Model m;
    m.layers = 1 + static_cast<int>(random() % 6);
    m.syncs = random() % 2 == 0;
    m.think = static_cast<int64_t>(random() % 400);
    for (int l = 0; l < m.layers; ++l) {
      m.compute.push_back(100 + static_cast<int64_t>(random() % 3000));
      m.comm.push_back(2 * (50 + static_cast<int64_t>(random() % 3000)));
    }
    const Built as_it_was = build(m, 1.0);
    const std::vector<Lane> lanes = accountLanes(as_it_was.timeline);
    ASSERT_EQ(lanes.size(), 1U);
    for (const double scale : {1.0, 0.5, 0.0}) {
      const ReplayResult r = replay(as_it_was.timeline, lanes[0], scale, {});
      EXPECT_EQ(r.measured_ns, as_it_was.span);
      EXPECT_EQ(r.replayed_ns, as_it_was.span);
      EXPECT_EQ(r.unexplained_ns, 0);
      EXPECT_EQ(r.what_if_ns, build(m, scale).span) << "round " << round << " scale " << scale;
      int64_t path = 0;
      for (const int64_t part : r.critical) path += part;
      EXPECT_EQ(path, r.measured_ns);
      for (const ReplayStep& s : r.steps) EXPECT_EQ(s.replayed_ns, s.measured_ns);
    }
  }
}

TEST(Replay, OnlyWhatCommunicationNeedsIsScaled) {
  Model m;
  m.layers = 1;
  m.steps = 1;
  m.compute = {100};
  m.comm = {10000};
  const Built b = build(m, 1.0);
  const std::vector<Lane> lanes = accountLanes(b.timeline);
  // 8000 of the 10000 are waiting for another rank.
  EXPECT_EQ(replay(b.timeline, lanes[0], 0.5, {2000}).what_if_ns, b.span - 1000);
}

TEST(Replay, GapsWithoutACauseAreReported) {
  Timeline t;
  t.streams = {{0, 7}};
  const uint32_t gemm = t.names.intern("gemm");
  trace::Activity a;
  a.name = gemm;
  a.end_ns = 1'000'000;
  t.activities.push_back(a);
  a.start_ns = 3'000'000;
  a.end_ns = 4'000'000;
  t.activities.push_back(a);
  ASSERT_TRUE(trace::finishTimeline(&t, trace::CommPatterns::create({}).value()).ok());
  const ReplayResult r = replay(t, accountLanes(t)[0], 1.0, {});
  EXPECT_EQ(r.replayed_ns, 4'000'000);
  EXPECT_EQ(r.unexplained_ns, 2'000'000);
}

}  // namespace
}  // namespace halfwire::analysis
