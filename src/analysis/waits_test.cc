#include "analysis/waits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "analysis/account.h"
#include "analysis/replay.h"
#include "trace/timeline_builder.h"

namespace halfwire::analysis {
namespace {

using trace::CallKind;
using trace::kNone;
using trace::Timeline;

std::vector<uint32_t> all(const Timeline& t) {
  std::vector<uint32_t> members(t.activities.size());
  for (uint32_t i = 0; i < members.size(); ++i) members[i] = i;
  return members;
}

Timeline unnamed(Timeline t) {
  for (trace::StreamWait& w : t.waits) {
    w.source_stream = kNone;
    w.record_correlation = -1;
  }
  return t;
}

// A device of three streams (compute, collectives, copies) whose program records events and waits for them,
// as the hardware would run it: work starts once its stream is free, its launch has arrived and every event
// waited for has fired, plus what a stream needs to pass an event.
class Program {
 public:
  explicit Program(std::mt19937* random) : random_(random) {
    t_.streams = {{0, 7}, {0, 20}, {0, 24}};
    t_.threads.push_back({1, 1, {}, {}});
    names_[0] = t_.names.intern("gemm");
    names_[1] = t_.names.intern("ncclDevKernel_AllReduce_Sum_f16(x)");
    names_[2] = t_.names.intern("cat");
  }

  int64_t pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*random_);
  }
  void think(int64_t ns) { host_ += ns; }
  void kernel(int stream, int64_t duration) { kernel(stream, duration, stream); }
  void kernel(int stream, int64_t duration, int name) {
    const int64_t launched = call(CallKind::kLaunch);
    const int64_t ready = std::max(free_[stream], launched + 4'000);
    trace::Activity a;
    a.start_ns = fence_[stream] > ready ? fence_[stream] + pick(2'000, 12'000) : ready + pick(800, 2'000);
    a.end_ns = a.start_ns + duration;
    a.stream = stream;
    a.name = names_[name];
    a.correlation = correlation_;
    free_[stream] = a.end_ns;
    t_.activities.push_back(a);
  }
  void wait(int waiting, int source) {
    call(CallKind::kEventRecord);
    const int64_t record = correlation_;
    const int64_t told = call(CallKind::kStreamWait);
    t_.waits.push_back({told, waiting, source, record, correlation_});
    fence_[waiting] = std::max(fence_[waiting], free_[source]);
  }
  Timeline finish() {
    EXPECT_TRUE(trace::finishTimeline(&t_, trace::CommPatterns::create({}).value()).ok());
    return std::move(t_);
  }

 private:
  int64_t call(CallKind kind) {
    const int64_t at = host_;
    t_.calls.push_back({at, at + 2'000, ++correlation_, 0, 0, kind});
    host_ += 2'500;
    return at;
  }

  std::mt19937* random_;
  Timeline t_;
  uint32_t names_[3] = {};
  int64_t host_ = 1'000'000, correlation_ = 0;
  int64_t free_[3] = {}, fence_[3] = {};
};

// Steps in which collectives run beside compute, a layer is waited for every so often, and copies hang on
// both.
Timeline randomProgram(std::mt19937* random, bool host_ahead) {
  Program p(random);
  p.kernel(0, 2'000'000);
  const int64_t layers = p.pick(10, 40);
  for (int64_t l = 0; l < layers; ++l) {
    for (int64_t k = p.pick(1, 6); k > 0; --k) p.kernel(0, p.pick(5'000, 200'000));
    p.wait(1, 0);
    p.kernel(1, p.pick(50'000, 1'500'000));
    if (p.pick(0, 2) == 0) p.wait(0, 1);
    if (p.pick(0, 3) == 0) {
      p.wait(2, p.pick(0, 1) == 0 ? 0 : 1);
      p.kernel(2, p.pick(5'000, 60'000));
      if (p.pick(0, 1) == 0) p.wait(0, 2);
    }
    if (!host_ahead && p.pick(0, 1) == 0) p.think(p.pick(0, 4'000'000));
  }
  p.wait(0, 1);
  p.kernel(0, 100'000);
  return p.finish();
}

// The definition, wait by wait over all activities.
ResolvedWait bruteForce(const Timeline& t, const trace::StreamWait& w) {
  const auto launch = [&](const trace::Activity& a) { return t.calls[a.call].start_ns; };
  ResolvedWait r;
  r.from_ns = w.time_ns;
  for (size_t i = t.activities.size(); i-- > 0;) {
    const trace::Activity& a = t.activities[i];
    if (a.stream != w.waiting_stream) continue;
    if (launch(a) < w.time_ns) {
      r.from_ns = std::max(r.from_ns, a.end_ns);
    } else {
      r.next = static_cast<int32_t>(i);
    }
  }
  if (r.next == kNone) return r;
  const trace::Activity& next = t.activities[r.next];
  for (size_t i = 0; i < t.activities.size(); ++i) {
    const trace::Activity& a = t.activities[i];
    if (a.stream == w.waiting_stream || launch(a) >= w.time_ns) continue;
    if (a.end_ns <= r.from_ns || a.end_ns > next.start_ns) continue;
    if (r.behind == kNone || a.end_ns > t.activities[r.behind].end_ns) r.behind = static_cast<int32_t>(i);
  }
  if (r.behind != kNone) {
    const int64_t end = t.activities[r.behind].end_ns;
    if (launch(next) >= end || next.start_ns - end > kWaitPasses) {
      r.behind = kNone;
      return r;
    }
  }
  r.source = WaitSource::kInferred;
  return r;
}

TEST(ResolveWaits, EqualsTheDefinition) {
  std::mt19937 random(3);
  size_t inferred = 0;
  size_t unknown = 0;
  for (int round = 0; round < 100; ++round) {
    const Timeline t = unnamed(randomProgram(&random, round % 2 == 0));
    const std::vector<ResolvedWait> waits = resolveWaits(t, 0, all(t));
    ASSERT_EQ(waits.size(), t.waits.size());
    for (size_t i = 0; i < waits.size(); ++i) {
      const ResolvedWait expected = bruteForce(t, t.waits[i]);
      EXPECT_EQ(waits[i].from_ns, expected.from_ns);
      EXPECT_EQ(waits[i].next, expected.next);
      EXPECT_EQ(waits[i].behind, expected.behind);
      EXPECT_EQ(waits[i].source, expected.source);
      inferred += expected.behind != kNone ? 1 : 0;
      unknown += expected.source == WaitSource::kUnknown ? 1 : 0;
    }
  }
  EXPECT_GT(inferred, 100U);
  EXPECT_GT(unknown, 50U);
}

// The same recordings with the events' names and without: what they say of stalls.
TEST(ResolveWaits, WithoutNamesStallsAgree) {
  std::mt19937 random(9);
  for (const bool host_ahead : {true, false}) {
    int64_t named = 0;
    int64_t without = 0;
    int64_t at_most = 0;
    int hidden = 0;
    for (int round = 0; round < 200; ++round) {
      const Timeline t = randomProgram(&random, host_ahead);
      const std::vector<Lane> with = accountLanes(t);
      const std::vector<Lane> stripped = accountLanes(unnamed(t));
      ASSERT_EQ(with.size(), 1U);
      EXPECT_EQ(with[0].stalled_from, StalledFrom::kRecorded);
      EXPECT_EQ(with[0].waits_unknown, 0U);
      // Where the host was late at every wait that held compute up, the times tell of none.
      hidden += stripped[0].stalled == 0 ? 1 : 0;
      EXPECT_EQ(stripped[0].stalled_from,
                stripped[0].stalled == 0 ? StalledFrom::kNothing : StalledFrom::kInferred);
      named += with[0].stalled;
      without += stripped[0].stalled;
      at_most += stripped[0].stalled_at_most;
      EXPECT_EQ(with[0].stalled_at_most, with[0].stalled);
      EXPECT_GE(stripped[0].stalled_at_most, with[0].stalled * 97 / 100);
    }
    ASSERT_GT(named, 0);
    EXPECT_LE(hidden, host_ahead ? 0 : 4);
    const double ratio = static_cast<double>(without) / static_cast<double>(named);
    RecordProperty(host_ahead ? "ratio_host_ahead" : "ratio_host_late", std::to_string(ratio));
    // A host that is late hides waits: then the inferred time is a lower bound.
    EXPECT_GT(ratio, host_ahead ? 0.98 : 0.80);
    EXPECT_GE(at_most, named);
    EXPECT_LT(ratio, 1.02);
  }
}

TEST(ResolveWaits, ReplayWithoutNamesExplainsWhatTheNamesDid) {
  std::mt19937 random(21);
  for (int round = 0; round < 100; ++round) {
    const Timeline named = randomProgram(&random, true);
    const Timeline t = unnamed(named);
    const Lane lane = accountLanes(t)[0];
    const ReplayResult r = replay(t, lane, 1.0, {});
    EXPECT_EQ(r.replayed_ns, r.measured_ns);
    const ReplayResult with = replay(named, accountLanes(named)[0], 1.0, {});
    EXPECT_LE(r.unexplained_ns, with.unexplained_ns + r.measured_ns / 100);
  }
}

// A step of FSDP2: the parts of an all-gather are copied together on a stream of their own, and what a
// reduce-scatter gives is cast behind it. The computing stream waits for the gather and for the cast.
TEST(Stalls, AreThoseOfComputeAndContainWhatFollowsACollectiveOnItsStream) {
  std::mt19937 random(5);
  Program p(&random);
  p.kernel(0, 1'000'000);
  p.wait(2, 0);
  p.kernel(2, 40'000);  // less than a tenth of compute
  p.wait(1, 2);
  p.kernel(1, 3'000'000);
  p.wait(2, 1);  // the next copy waits for the gather: nobody's compute does
  p.kernel(2, 40'000);
  p.wait(0, 1);
  p.kernel(0, 1'000'000);
  p.wait(1, 0);
  p.kernel(1, 2'000'000);
  p.kernel(1, 50'000, 0);
  p.wait(0, 1);
  p.kernel(0, 1'000'000);
  const Timeline t = p.finish();
  const auto& a = t.activities;
  // By start: compute, copy, gather, then copy and compute behind it, reduce, cast, compute.
  ASSERT_EQ(a.size(), 8U);
  const int64_t gather = a[2].end_ns - a[0].end_ns;
  const int64_t cast = a[6].end_ns - std::max(a[3].end_ns, a[4].end_ns);
  for (const Timeline& each : {t, unnamed(t)}) {
    const Lane lane = accountLanes(each)[0];
    EXPECT_EQ(lane.stalled, gather + cast);
  }
}

// A collective on the computing stream itself is waited for there, and does not make it a stream of
// collectives.
TEST(Stalls, AreCollectivesOnTheComputingStreamToo) {
  std::mt19937 random(6);
  Program p(&random);
  p.kernel(0, 1'000'000);
  p.kernel(0, 300'000, 1);
  p.kernel(0, 1'000'000);
  p.wait(1, 0);
  p.kernel(1, 2'000'000);
  p.wait(0, 1);
  p.kernel(0, 500'000);
  const Timeline t = p.finish();
  ASSERT_EQ(t.activities.size(), 5U);
  const int64_t waited = t.activities[3].end_ns - t.activities[2].end_ns;
  for (const Timeline& each : {t, unnamed(t)}) EXPECT_EQ(accountLanes(each)[0].stalled, 300'000 + waited);
}

// Eleven streams share the compute evenly: all of them compute.
TEST(Stalls, EvenSharesAreCompute) {
  std::mt19937 random(7);
  Program p(&random);
  p.kernel(0, 100'000);
  p.wait(1, 0);
  p.kernel(1, 2'000'000);
  p.wait(0, 1);
  p.kernel(0, 100'000);
  Timeline t = p.finish();
  const int64_t alone = accountLanes(t)[0].stalled;
  EXPECT_GT(alone, 1'000'000);
  for (int s = 0; s < 10; ++s) {
    t.streams.push_back({0, 100 + s});
    trace::Activity a = t.activities[0];
    a.end_ns = a.start_ns + 200'000;
    a.stream = static_cast<int32_t>(t.streams.size()) - 1;
    t.activities.push_back(a);
  }
  ASSERT_TRUE(trace::finishTimeline(&t, trace::CommPatterns::create({}).value()).ok());
  EXPECT_EQ(accountLanes(t)[0].stalled, alone);
}

TEST(ResolveWaits, OneWaitNamesNothingAndNothingIsKnown) {
  std::mt19937 random(1);
  Program p(&random);
  p.kernel(1, 50'000);
  p.wait(0, 1);
  const Timeline t = unnamed(p.finish());
  const Lane lane = accountLanes(t)[0];
  EXPECT_EQ(lane.waits, 1U);
  EXPECT_EQ(lane.waits_unknown, 1U);
  EXPECT_EQ(lane.stalled_from, StalledFrom::kNothing);
}

// No order holds: launches after starts, overlaps, waits anywhere, names of some waits only.
TEST(ResolveWaits, DisorderIsResolvedSomehow) {
  std::mt19937 random(17);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    Timeline t;
    t.threads.push_back({1, 1, {}, {}});
    for (int s = 0; s < 6; ++s) t.streams.push_back({s % 2, s});
    const uint32_t names[] = {t.names.intern("gemm"), t.names.intern("ncclDevKernel_AllReduce_Sum_f16(x)")};
    for (int i = 0; i < static_cast<int>(random() % 30); ++i) {
      trace::Activity a;
      a.start_ns = pick(-100, 300);
      a.end_ns = a.start_ns + pick(0, 90);
      a.name = names[random() % 2];
      a.stream = static_cast<int32_t>(pick(0, 5));
      a.correlation = pick(0, 2) == 0 ? -1 : pick(1, 20);
      t.activities.push_back(a);
      const int64_t start = pick(-200, 300);
      t.calls.push_back({start, start + pick(0, 50), pick(1, 20), 0, 0, CallKind::kLaunch});
    }
    for (int i = 0; i < 20; ++i) {
      t.waits.push_back({pick(-200, 400), static_cast<int32_t>(pick(0, 5)), static_cast<int32_t>(pick(-1, 5)),
                         pick(-1, 20), pick(-1, 20)});
    }
    ASSERT_TRUE(trace::finishTimeline(&t, trace::CommPatterns::create({}).value()).ok());
    for (const Lane& lane : accountLanes(t)) {
      EXPECT_GE(lane.stalled, 0);
      EXPECT_LE(lane.waits_unknown, lane.waits);
      const ReplayResult r = replay(t, lane, 0.5, {});
      EXPECT_EQ(r.replayed_ns, r.measured_ns);
    }
  }
}

}  // namespace
}  // namespace halfwire::analysis
