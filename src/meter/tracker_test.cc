// The tracker against a brute-force oracle over random schedules, and the rules by name.
#include "meter/tracker.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

namespace halfwire::meter {
namespace {

constexpr StreamKey kA = 0x1000, kB = 0x2000, kC = 0x3000, kComm = 0x4000, kRelay = 0x5000;
constexpr EventKey kE = 0x10, kF = 0x20;

TEST(Tracker, AWaitForACollectiveIsOne) {
  Tracker t;
  t.onLaunch(kA, 1);
  EXPECT_FALSE(t.onCollective(kComm, 1));
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 1u);
  EXPECT_EQ(t.onWait(kA, kE), 1u);  // a second time: it will stall for nothing, and is measured as that
}

TEST(Tracker, ComputeEndsAMark) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onLaunch(kB, 1);
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 1u);
  t.onRecord(kF, kA);
  EXPECT_EQ(t.onWait(kB, kF), 0u);
}

TEST(Tracker, RelaysAndCommunicationStreamsPassMarksOn) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kRelay, kE), 0u);
  t.onRecord(kF, kRelay);
  EXPECT_EQ(t.onWait(kA, kF), 1u);
  t.onCollective(kC, 2);
  t.onWait(kComm, kF);
  t.onRecord(kF, kC);
  t.onWait(kComm, kF);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 2u) << "the last enqueued answers for all";
}

TEST(Tracker, AStreamThatFeedsCollectivesComputesThoughNoKernelIsSeen) {
  Tracker t;
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 0u) << "so far it is a relay";
  t.onRecord(kF, kA);
  EXPECT_EQ(t.onWait(kComm, kF), 0u);  // its own collective back: there must be work of A's behind it
  t.onCollective(kComm, 2);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 2u);
  // What brings another stream's collective may be no more than a relay.
  t.onCollective(kC, 3);
  t.onRecord(kE, kC);
  EXPECT_EQ(t.onWait(kRelay, kE), 0u);
  t.onRecord(kF, kRelay);
  EXPECT_EQ(t.onWait(kComm, kF), 0u);
  EXPECT_EQ(t.onWait(kRelay, kE), 0u);
}

TEST(Tracker, ACopyEndsARelay) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  t.onWait(kRelay, kE);
  t.onCopy(kRelay);
  t.onRecord(kF, kRelay);
  EXPECT_EQ(t.onWait(kA, kF), 0u);
}

TEST(Tracker, ARecordWaitedForIsTheLastBeforeTheWait) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  t.onRecord(kE, kA);  // recorded again, not behind a collective
  EXPECT_EQ(t.onWait(kA, kE), 0u);
  EXPECT_EQ(t.onWait(kA, kF), 0u);  // never recorded
}

TEST(Tracker, CollectivesOnComputeStreamsAreBracketedThemselves) {
  Tracker t;
  t.onLaunch(kA, kComputeLaunches - 1);
  EXPECT_FALSE(t.onCollective(kA, 1)) << "what prepares a message is not compute";
  t.onLaunch(kB, kComputeLaunches);
  EXPECT_TRUE(t.onCollective(kB, 2));
  t.onRecord(kE, kB);
  t.onLaunch(kC, 1);
  EXPECT_EQ(t.onWait(kC, kE), 0u);
  EXPECT_FALSE(t.onCollective(kLegacyStream, 3)) << "no work was seen on it";
  t.onLaunch(kLegacyStream, 1);
  EXPECT_TRUE(t.onCollective(kLegacyStream, 4));
}

TEST(Tracker, ACommunicationStreamStaysOneHoweverManyKernelsItRuns) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onCollective(kComm, 1);
  t.onLaunch(kComm, 1000);
  EXPECT_FALSE(t.onCollective(kComm, 2));
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 2u);
}

TEST(Tracker, ADestroyedStreamsHandleStartsAgain) {
  Tracker t;
  t.onCollective(kComm, 1);
  t.onStreamDestroy(kComm);
  t.onLaunch(kComm, kComputeLaunches);
  EXPECT_TRUE(t.onCollective(kComm, 2));
}

TEST(Tracker, HostWaitsKnowWhetherTheyAreBehindACollective) {
  Tracker t;
  t.onLaunch(kA, 1);
  EXPECT_EQ(t.onHostWaitAll(), 0u);
  t.onCollective(kComm, 1);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onHostWaitStream(kA), 0u);
  t.onWait(kA, kE);
  t.onRecord(kF, kA);
  EXPECT_EQ(t.onHostWaitEvent(kF), 1u) << "through compute: the host waits for all of it";
  EXPECT_EQ(t.onHostWaitStream(kA), 0u) << "it has waited for that collective already";
  t.onCollective(kComm, 2);
  EXPECT_EQ(t.onHostWaitAll(), 2u);
}

TEST(Tracker, FullTablesForgetTheOldestAndCount) {
  Tracker t;
  t.onLaunch(kA, 1);
  t.onCollective(kComm, 1);
  for (uint64_t e = 1; e <= 100'000; ++e) t.onRecord(e << 8, kComm);
  EXPECT_GT(t.lost(), 0u);
  t.onCollective(kComm, 2);
  t.onRecord(kE, kComm);
  EXPECT_EQ(t.onWait(kA, kE), 2u);
  for (uint64_t s = 1; s <= 10'000; ++s) t.onLaunch(s << 12, 1);
  EXPECT_EQ(t.onWait(0x7777'0000, kE), 0u);
}

// The rules read off the whole history each time.
class Oracle {
 public:
  enum class What { kCollective, kLaunch, kCopy, kRecord, kWait };
  struct Operation {
    What what;
    size_t stream;
    size_t event;
    uint64_t number;  // of the collective; of the kernels
  };
  void add(const Operation& op) { history_.push_back(op); }

  enum class Role { kRelay, kCompute, kCommunication };
  // Of `stream` before operation `at`.
  Role role(size_t stream, size_t at) const {
    const auto known = roles_.find({stream, at});
    if (known != roles_.end()) return known->second;
    return roles_[{stream, at}] = findRole(stream, at);
  }
  Role findRole(size_t stream, size_t at) const {
    uint64_t launches = 0;
    for (size_t i = 0; i < at; ++i) {
      const Operation& op = history_[i];
      if (op.stream != stream) continue;
      if (op.what == What::kLaunch) launches += op.number;
      if (op.what == What::kCollective)
        return launches >= kComputeLaunches ? Role::kCompute : Role::kCommunication;
    }
    return launches > 0 || feeds(stream, at) ? Role::kCompute : Role::kRelay;
  }

  // Whether a communication stream waited for `stream` and came behind no other collective by it.
  bool feeds(size_t stream, size_t at) const {
    for (size_t i = 0; i < at; ++i) {
      const Operation& op = history_[i];
      if (op.what != What::kWait || op.stream == stream || role(op.stream, i) != Role::kCommunication)
        continue;
      size_t record = i;
      while (record > 0 &&
             (history_[record - 1].what != What::kRecord || history_[record - 1].event != op.event))
        --record;
      if (record == 0 || history_[record - 1].stream != stream) continue;
      if (mark(stream, record - 1) <= mark(op.stream, i)) return true;
    }
    return false;
  }

  // What a record on `stream` as operation `at` would be behind.
  uint64_t mark(size_t stream, size_t at) const {
    const Role now = role(stream, at);
    if (now == Role::kCompute) return 0;
    uint64_t newest = 0;
    for (size_t i = at; i-- > 0;) {
      const Operation& op = history_[i];
      if (op.stream != stream) continue;
      if (op.what == What::kCollective) newest = std::max(newest, op.number);
      if (op.what == What::kWait) newest = std::max(newest, recorded(op.event, i));
      // Work before a stream's first collective ends what came to it through waits.
      const bool relay = role(stream, i) != Role::kCommunication;
      if (relay && (op.what == What::kCopy || op.what == What::kLaunch)) break;
    }
    return newest;
  }
  uint64_t recorded(size_t event, size_t at) const {
    for (size_t i = at; i-- > 0;) {
      if (history_[i].what == What::kRecord && history_[i].event == event) return mark(history_[i].stream, i);
    }
    return 0;
  }
  uint64_t wait(size_t stream, size_t event) const {
    return role(stream, history_.size()) == Role::kCompute ? recorded(event, history_.size()) : 0;
  }
  bool direct(size_t stream) const {
    uint64_t launches = 0;
    for (const Operation& op : history_) {
      if (op.stream != stream) continue;
      if (op.what == What::kLaunch) launches += op.number;
      if (op.what == What::kCollective) return launches >= kComputeLaunches;
    }
    return launches >= kComputeLaunches;
  }

 private:
  std::vector<Operation> history_;
  mutable std::map<std::pair<size_t, size_t>, Role> roles_;
};

TEST(Tracker, RandomSchedulesAgreeWithTheOracle) {
  using What = Oracle::What;
  uint64_t waits = 0, collectives = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    std::mt19937 random(seed);
    const auto any = [&](size_t n) { return random() % n; };
    Tracker tracker;
    Oracle oracle;
    uint64_t id = 0;
    for (int i = 0; i < 60; ++i) {
      const size_t stream = any(5);
      const size_t event = any(5);
      const StreamKey key = 0x1000 + 0x100 * stream;
      const EventKey event_key = 0x10 + 0x10 * event;
      switch (any(8)) {
        case 0: {
          const bool direct = tracker.onCollective(key, ++id);
          ASSERT_EQ(direct, oracle.direct(stream)) << "seed " << seed << " operation " << i;
          oracle.add({What::kCollective, stream, 0, id});
          collectives += direct ? 1 : 0;
          break;
        }
        case 1: {
          const uint64_t kernels = any(2) == 0 ? 1 : 20;
          tracker.onLaunch(key, kernels);
          oracle.add({What::kLaunch, stream, 0, kernels});
          break;
        }
        case 2:
          if (any(3) != 0) break;
          tracker.onCopy(key);
          oracle.add({What::kCopy, stream, 0, 0});
          break;
        case 3:
        case 4:
          tracker.onRecord(event_key, key);
          oracle.add({What::kRecord, stream, event, 0});
          break;
        default: {
          const uint64_t want = oracle.wait(stream, event);
          ASSERT_EQ(tracker.onWait(key, event_key), want) << "seed " << seed << " operation " << i;
          oracle.add({What::kWait, stream, event, 0});
          waits += want != 0 ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(waits, 500u);
  EXPECT_GT(collectives, 100u);
}

}  // namespace
}  // namespace halfwire::meter
