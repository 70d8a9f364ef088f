#include "analysis/account.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "analysis/steps.h"
#include "trace/timeline_builder.h"

namespace halfwire::analysis {
namespace {

using trace::ActivityKind;
using trace::CallKind;
using trace::Timeline;

// A timeline of random intervals: overlapping, nested, empty, of all kinds, on several streams.
Timeline randomTimeline(std::mt19937* random, int n, int64_t range) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*random);
  };
  Timeline t;
  const uint32_t names[] = {t.names.intern("gemm"), t.names.intern("ncclDevKernel_AllReduce_Sum_f16(x)"),
                            t.names.intern("halfwire::pack"), t.names.intern("Memcpy HtoD"),
                            t.names.intern("Memset")};
  t.threads.push_back({1, 1, {}, {}});
  t.threads.push_back({1, 2, {}, {}});
  for (int s = 0; s < 4; ++s) t.streams.push_back({0, s});
  for (int i = 0; i < n; ++i) {
    trace::Activity a;
    a.start_ns = pick(0, range);
    a.end_ns = a.start_ns + (pick(0, 4) == 0 ? 0 : pick(0, 20));
    const auto kind = static_cast<size_t>(pick(0, 4));
    a.kind = kind == 3 ? ActivityKind::kCopy : kind == 4 ? ActivityKind::kSet : ActivityKind::kCompute;
    a.name = names[kind];
    a.stream = static_cast<int32_t>(pick(0, 3));
    a.correlation = pick(0, 9) == 0 ? -1 : i + 1;
    t.activities.push_back(a);
    trace::HostCall c;
    c.start_ns = a.start_ns - pick(0, 30);
    c.end_ns = c.start_ns + pick(0, 10);
    c.correlation = i + 1;
    c.thread = static_cast<int32_t>(pick(0, 1));
    c.kind = CallKind::kLaunch;
    t.calls.push_back(c);
    if (pick(0, 3) == 0) t.calls.push_back({c.start_ns - 5, c.start_ns, -1, 0, c.thread, CallKind::kSync});
    if (pick(0, 5) == 0) t.threads[0].loading.push_back({c.start_ns - 9, c.start_ns - 3});
  }
  for (int64_t s = 0; s < range; s += range / 3) t.steps.push_back({s, s, s + range / 3});
  EXPECT_TRUE(trace::finishTimeline(&t, trace::CommPatterns::create({}).value()).ok());
  return t;
}

// Counts every nanosecond by itself.
Parts bruteForce(const Timeline& t, int64_t from, int64_t to, std::vector<double>* shares) {
  Parts p;
  for (int64_t now = from; now < to; ++now) {
    bool compute = false;
    bool codec = false;
    bool copy = false;
    std::vector<size_t> comms;
    size_t comm_index = 0;
    for (const trace::Activity& a : t.activities) {
      const bool here = a.start_ns <= now && now < a.end_ns;
      const bool counted = a.kind == ActivityKind::kComm && a.end_ns > a.start_ns;
      if (here) {
        compute = compute || a.kind == ActivityKind::kCompute;
        codec = codec || a.kind == ActivityKind::kCodec;
        copy = copy || trace::isCopy(a.kind);
        if (a.kind == ActivityKind::kComm) comms.push_back(comm_index);
      }
      if (counted) ++comm_index;
    }
    const bool network = codec || !comms.empty();
    ++p.span;
    p.compute += compute ? 1 : 0;
    p.comm += comms.empty() ? 0 : 1;
    p.codec += codec ? 1 : 0;
    p.copy += copy ? 1 : 0;
    p.exposed += network && !compute ? 1 : 0;
    p.exposed_codec += codec && comms.empty() && !compute ? 1 : 0;
    p.exposed_bare += network && !compute && !copy ? 1 : 0;
    p.copy_alone += copy && !network && !compute ? 1 : 0;
    p.idle += !copy && !network && !compute ? 1 : 0;
    if (shares == nullptr || compute) continue;
    for (const size_t c : comms) (*shares)[c] += 1.0 / static_cast<double>(comms.size());
  }
  return p;
}

void expectEqual(const Parts& a, const Parts& b) {
  EXPECT_EQ(a.span, b.span);
  EXPECT_EQ(a.compute, b.compute);
  EXPECT_EQ(a.comm, b.comm);
  EXPECT_EQ(a.codec, b.codec);
  EXPECT_EQ(a.exposed, b.exposed);
  EXPECT_EQ(a.exposed_codec, b.exposed_codec);
  EXPECT_EQ(a.exposed_bare, b.exposed_bare);
  EXPECT_EQ(a.copy, b.copy);
  EXPECT_EQ(a.copy_alone, b.copy_alone);
  EXPECT_EQ(a.idle, b.idle);
}

TEST(AccountLanes, EqualsCountingEveryNanosecond) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const int n = 1 + static_cast<int>(random() % 40);
    const Timeline t = randomTimeline(&random, n, 10 + static_cast<int64_t>(random() % 400));
    const std::vector<Lane> lanes = accountLanes(t);
    ASSERT_EQ(lanes.size(), 1U);
    const Lane& lane = lanes[0];
    std::vector<double> shares(lane.comms.size(), 0);
    expectEqual(lane.total, bruteForce(t, lane.start_ns, lane.end_ns, &shares));
    EXPECT_EQ(lane.total.compute + lane.total.exposed + lane.total.copy_alone + lane.total.idle,
              lane.total.span);

    int64_t in_steps = 0;
    for (const StepAccount& s : lane.steps) {
      expectEqual(s.parts, bruteForce(t, s.start_ns, s.start_ns + s.parts.span, nullptr));
      in_steps += s.parts.span;
    }
    EXPECT_EQ(in_steps + lane.outside_steps_ns, lane.total.span);

    int64_t shared = 0;
    for (size_t i = 0; i < shares.size(); ++i) {
      EXPECT_NEAR(static_cast<double>(lane.comms[i].exposed_ns), shares[i], 0.5 * static_cast<double>(n));
      shared += lane.comms[i].exposed_ns;
    }
    EXPECT_EQ(shared, lane.total.exposed - lane.total.exposed_codec);

    int64_t idle = 0;
    for (const int64_t cause : lane.idle) idle += cause;
    EXPECT_EQ(idle, lane.total.idle);
    EXPECT_EQ(lane.idle_host_late + lane.idle_launched_before + lane.idle_unmatched, lane.total.idle);
    int64_t gaps = 0;
    for (const Gap& g : lane.gaps) {
      int64_t sum = 0;
      for (const int64_t cause : g.causes) {
        EXPECT_GE(cause, 0);
        sum += cause;
      }
      EXPECT_EQ(sum, g.end_ns - g.start_ns);
      gaps += sum;
    }
    EXPECT_EQ(gaps, lane.total.idle);
    int64_t at = lane.start_ns;
    for (const Segment& s : lane.segments) {
      EXPECT_EQ(s.start_ns, at);
      at = s.end_ns;
    }
    EXPECT_EQ(at, lane.end_ns);
  }
}

TEST(Intervals, SetAlgebraEqualsCounting) {
  std::mt19937 random(11);
  for (int round = 0; round < 500; ++round) {
    const auto set = [&] {
      Spans s;
      for (int i = 0; i < static_cast<int>(random() % 12); ++i) {
        const auto from = static_cast<int64_t>(random() % 60);
        s.push_back({from, from + static_cast<int64_t>(random() % 12)});
      }
      return unionOf(s);
    };
    const Spans a = set();
    const Spans b = set();
    const auto in = [](const Spans& s, int64_t x) {
      return std::any_of(s.begin(), s.end(), [x](const Span& p) { return p.start_ns <= x && x < p.end_ns; });
    };
    int64_t both = 0;
    int64_t only = 0;
    int64_t within = 0;
    for (int64_t x = 0; x < 80; ++x) {
      both += in(a, x) && in(b, x) ? 1 : 0;
      only += in(a, x) && !in(b, x) ? 1 : 0;
      within += in(a, x) && x >= 20 && x < 45 ? 1 : 0;
    }
    EXPECT_EQ(length(intersect(a, b)), both);
    EXPECT_EQ(length(subtract(a, b)), only);
    EXPECT_EQ(lengthWithin(a, 20, 45), within);
  }
}

TEST(FindPeriod, NeedsThreeRepetitions) {
  const auto period = [](std::vector<uint64_t> s) { return findPeriod(s); };
  EXPECT_EQ(period({1, 2, 3, 1, 2, 3, 1, 2, 3, 1}), 3U);
  EXPECT_EQ(period({1, 2, 3, 1, 2, 3}), 0U);
  EXPECT_EQ(period({1, 1, 1, 1}), 1U);
  EXPECT_EQ(period({}), 0U);
}

}  // namespace
}  // namespace halfwire::analysis
