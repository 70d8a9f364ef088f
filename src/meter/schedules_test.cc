// The meter against the truth: random schedules of kernels, collectives, records and waits on the host
// engine. What the meter says of each is compared with what the engine's own times of the same run say, by a
// brute-force reading of which waits are for collectives.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "policy/run_log_json.h"
#include "support/launch.h"
#include "support/nccl_check.h"
#include "support/rank.h"

extern "C" void halfwire_step(void) __attribute__((weak));

namespace halfwire {
namespace {

using testing::Rank;

constexpr int kWarmup = 12;
constexpr int kCompute = 2, kComm = 2, kRelay = 1;
constexpr int kStreams = kCompute + kComm + kRelay;
constexpr int kEvents = 5;

bool isComm(int stream) { return stream >= kCompute && stream < kCompute + kComm; }

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Kernels take time without a processor, as a device's do.
void pause(void* microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(microseconds)));
}

void kernel(cudaStream_t stream, int64_t microseconds) {
  CHECK_CUDA(cudaLaunchHostFunc(stream, pause, reinterpret_cast<void*>(microseconds)));
}

// One line an operation: schedule, kind, stream, event, host time before and after the call.
RANK_PROGRAM(RandomSchedules) {
  const int schedules = std::stoi(rank.args().at(0));
  std::FILE* out =
      std::fopen((rank.args().at(1) + "/program-" + std::to_string(rank.rank()) + ".txt").c_str(), "w");
  RANK_CHECK(out != nullptr && halfwire_step != nullptr);
  cudaStream_t streams[kStreams];
  cudaEvent_t events[kEvents];
  for (cudaStream_t& s : streams) CHECK_CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (cudaEvent_t& e : events) CHECK_CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  void* buffer = nullptr;
  CHECK_CUDA(cudaMalloc(&buffer, 1 << 20));
  const ncclComm_t comm = testing::makeWorld(rank);
  int calls = 0;
  const auto collective = [&](int stream, size_t bytes) {
    const bool grouped = ++calls % 4 == 0;
    if (grouped) CHECK_NCCL(ncclGroupStart());
    CHECK_NCCL(ncclAllReduce(buffer, buffer, bytes, ncclUint8, ncclMax, comm, streams[stream]));
    if (grouped) CHECK_NCCL(ncclGroupEnd());
  };
  for (int i = 0; i < kCompute; ++i) {
    for (int k = 0; k < 20; ++k) kernel(streams[i], 1);
  }
  for (int i = 0; i < kComm; ++i) collective(kCompute + i, 16);
  CHECK_CUDA(cudaDeviceSynchronize());

  // What a communication stream waits for has work of its own behind it: a relay between a stream that
  // computes and one that sends is taken for the former.
  int recorded_on[kEvents];
  std::fill_n(recorded_on, kEvents, 0);
  for (int schedule = 0; schedule < schedules; ++schedule) {
    rank.note("schedule", schedule);
    halfwire_step();
    // Collectives come in the same order on all ranks; everything between them is each rank's own.
    std::mt19937 shared(1000 + static_cast<unsigned>(schedule));
    std::mt19937 own(2000 + static_cast<unsigned>(schedule * 8 + rank.rank()));
    const auto any = [&](int n) { return static_cast<int>(own() % static_cast<unsigned>(n)); };
    const auto log = [&](char kind, int stream, int event, int64_t before) {
      std::fprintf(out, "%d %c %d %d %lld %lld\n", schedule, kind, stream, event,
                   static_cast<long long>(before), static_cast<long long>(now()));
    };
    const int collectives = 1 + static_cast<int>(shared() % 4);
    for (int c = 0; c <= collectives; ++c) {
      for (int i = any(6); i > 0; --i) {
        const int stream = any(kStreams);
        const int event = any(kEvents);
        const int64_t before = now();
        switch (any(4)) {
          case 0:
            // Communication streams run small kernels too; relays never.
            kernel(streams[stream % (kCompute + kComm)], 50 + any(1000));
            break;
          case 1:
            CHECK_CUDA(cudaEventRecord(events[event], streams[stream]));
            recorded_on[event] = stream;
            log('r', stream, event, before);
            break;
          default:
            if (isComm(stream) && recorded_on[event] >= kCompute + kComm) break;
            CHECK_CUDA(cudaStreamWaitEvent(streams[stream], events[event], 0));
            log('w', stream, event, before);
        }
      }
      if (c == collectives) break;
      const bool direct = shared() % 5 == 0;
      const int stream =
          direct ? static_cast<int>(shared() % kCompute) : kCompute + static_cast<int>(shared() % kComm);
      const size_t bytes = 4096 + shared() % 60000;
      const int64_t before = now();
      collective(stream, bytes);
      log('c', stream, -1, before);
      if (any(3) == 0) continue;
      // What programs do: record behind it and let a compute stream wait.
      const int event = any(kEvents);
      const int64_t between = now();
      CHECK_CUDA(cudaEventRecord(events[event], streams[stream]));
      recorded_on[event] = stream;
      log('r', stream, event, between);
      if (any(2) == 0) kernel(streams[any(kCompute)], 50 + any(1500));
      const int waiter = any(kCompute);
      const int64_t wait = now();
      CHECK_CUDA(cudaStreamWaitEvent(streams[waiter], events[event], 0));
      log('w', waiter, event, wait);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  for (int i = 0; i < 3; ++i) halfwire_step();
  std::fclose(out);
  CHECK_NCCL(ncclCommDestroy(comm));
}

struct Operation {
  int schedule;
  char kind;
  int stream, event;
  int64_t before, after;
};

struct Entry {
  char kind;
  int64_t enqueued, reached, started, ended;
};

using SpanList = std::vector<std::pair<int64_t, int64_t>>;

// The engine's threads are scheduled: a wait begins at the earliest when it is enqueued and all before it has
// ended, and at the latest when its stream's thread comes to it. It ends between its own end and that
// thread's coming to the next entry. On a device these are one.
struct Truth {
  SpanList longest, shortest;
  int waits = 0;
};

// Each moment once, in nanoseconds.
int64_t covered(SpanList spans) {
  std::sort(spans.begin(), spans.end());
  int64_t sum = 0;
  int64_t reached = 0;
  for (const auto& [from, to] : spans) {
    sum += std::max<int64_t>(to - std::max(from, reached), 0);
    reached = std::max(reached, to);
  }
  return sum;
}

// Whether what was recorded by operation `at` stands behind a collective: anything before it on its stream is
// one, or a wait for such a record. Compute streams pass nothing on.
bool behind(const std::vector<Operation>& ops, size_t at) {
  const int stream = ops[at].stream;
  if (stream < kCompute) return false;
  for (size_t i = at; i-- > 0;) {
    if (ops[i].stream != stream) continue;
    if (ops[i].kind == 'c') return true;
    if (ops[i].kind != 'w') continue;
    for (size_t r = i; r-- > 0;) {
      if (ops[r].kind != 'r' || ops[r].event != ops[i].event) continue;
      if (behind(ops, r)) return true;
      break;
    }
  }
  return false;
}

std::vector<Truth> truthOf(const std::vector<Operation>& ops, const std::map<int, std::vector<Entry>>& trace,
                           int schedules) {
  std::vector<Truth> truth(static_cast<size_t>(schedules));
  // Collectives of the warm-up make every communication stream one; a schedule before counts for the next.
  for (size_t i = 0; i < ops.size(); ++i) {
    const Operation& op = ops[i];
    if (op.stream >= kCompute || (op.kind != 'w' && op.kind != 'c')) continue;
    if (op.kind == 'w') {
      size_t record = i;
      while (record-- > 0 && (ops[record].kind != 'r' || ops[record].event != op.event)) {
      }
      if (record == SIZE_MAX || !behind(ops, record)) continue;
    }
    ++truth[static_cast<size_t>(op.schedule)].waits;
    // The entries that this call enqueued, and what its stream did before.
    const std::vector<Entry>& entries = trace.at(op.stream);
    auto first = std::partition_point(entries.begin(), entries.end(),
                                      [&](const Entry& e) { return e.enqueued < op.before; });
    auto last = std::partition_point(entries.begin(), entries.end(),
                                     [&](const Entry& e) { return e.enqueued <= op.after; });
    while (first != last && first->kind == 'r') ++first;
    while (first != last && (last - 1)->kind == 'r') --last;
    if (first == last) continue;  // the event had fired: nothing was enqueued
    const int64_t ended = (last - 1)->ended;
    const int64_t free = first == entries.begin() ? 0 : (first - 1)->ended;
    const bool queued = last != entries.end() && last->enqueued < ended;
    truth[static_cast<size_t>(op.schedule)].longest.emplace_back(
        std::max(first->enqueued, free), queued ? std::max(ended, last->reached) : ended);
    truth[static_cast<size_t>(op.schedule)].shortest.emplace_back(first->reached, ended);
  }
  return truth;
}

TEST(Schedules, MeteredIsTheEnginesTruth) {
  constexpr int kSchedules = 512;
  const testing::TemporaryDirectory logs;
  testing::LaunchOptions options;
  options.ranks = 2;
  options.library = testing::libraryPath() + ":" + HALFWIRE_METER_LIBRARY;
  options.env = {{"HALFWIRE_MODE", "meter"},
                 {"HALFWIRE_METER_EVERY", "1"},
                 {"HALFWIRE_LOG_DIR", logs.path()},
                 {"HALFWIRE_HOST_TRACE", logs.path()},
                 {"HALFWIRE_HOST_LINK", "600Mbit"}};
  options.args = {std::to_string(kSchedules), logs.path()};
  options.timeout_s = 200;
  const auto outcome = testing::launchRanks("RandomSchedules", options);
  ASSERT_TRUE(outcome.ok()) << outcome.describe();

  std::vector<std::string> problems;
  const auto records = readRunLogs(logs.path(), &problems);
  ASSERT_EQ(records.size(), 2u);
  int compared = 0, beyond = 0, off_reached = 0, interrupted = 0;
  double worst_us = 0, total_metered = 0, total_least = 0, total_most = 0;
  for (const RunLogRecord& record : records) {
    ASSERT_EQ(record.meter.state, MeterState::kOn) << record.meter.words;
    EXPECT_EQ(record.meter.source, StepSource::kMarked);
    std::vector<Operation> ops;
    std::ifstream program(logs.path() + "/program-" + std::to_string(record.rank) + ".txt");
    for (Operation op; program >> op.schedule >> op.kind >> op.stream >> op.event >> op.before >> op.after;)
      ops.push_back(op);
    std::map<int, std::vector<Entry>> trace;
    std::ifstream times(logs.path() + "/streams-" + std::to_string(record.rank) + "-" +
                        std::to_string(record.pid) + ".txt");
    int stream = 0;
    for (Entry e; times >> stream >> e.kind >> e.enqueued >> e.reached >> e.started >> e.ended;)
      trace[stream].push_back(e);
    ASSERT_GE(trace.size(), 4u);
    const std::vector<Truth> truth = truthOf(ops, trace, kSchedules);
    for (const RunLogStepRecord& step : record.meter.steps) {
      if (step.number < kWarmup || step.number >= kSchedules) continue;
      ASSERT_TRUE(step.measured) << step.number;
      const Truth& t = truth[step.number];
      if (step.unmeasured > 0) {
        // The host was interrupted in the middle of a bracket, and the meter says so.
        ++interrupted;
        continue;
      }
      EXPECT_EQ(static_cast<int>(step.waits), t.waits)
          << "rank " << record.rank << " schedule " << step.number;
      const double metered = static_cast<double>(step.exposed_ns) * 1e-3;
      const double least = static_cast<double>(covered(t.shortest)) * 1e-3;
      const double most = static_cast<double>(covered(t.longest)) * 1e-3;
      const double off = std::max({0.0, least - metered, metered - most});
      ++compared;
      total_metered += metered;
      total_least += least;
      total_most += most;
      worst_us = std::max(worst_us, off);
      off_reached += std::abs(metered - least) > std::max(50.0, 0.02 * least) ? 1 : 0;
      if (off <= std::max(50.0, 0.02 * least)) continue;
      ++beyond;
      std::printf("rank %d schedule %d: metered %.1f us, truth %.1f to %.1f us\n", record.rank,
                  static_cast<int>(step.number), metered, least, most);
    }
  }
  std::printf(
      "%d schedules, %.1f ms metered, %.1f to %.1f ms true, worst %.1f us outside, %d beyond 2 %% and 50 us "
      "(%d "
      "against the "
      "innermost times alone), %d interrupted\n",
      compared, total_metered * 1e-3, total_least * 1e-3, total_most * 1e-3, worst_us, beyond, off_reached,
      interrupted);
  EXPECT_EQ(compared + interrupted, 2 * (kSchedules - kWarmup));
  EXPECT_GE(compared, 500);
  EXPECT_GT(total_least, 1e5);
  // Where others use the machine, a thread of the engine is taken off the processor between two of its own
  // times now and then.
  EXPECT_LE(beyond, compared / 200);
  // The truth is an interval, the wider the busier the machine.
  EXPECT_GT(total_metered, 0.99 * total_least);
  EXPECT_LT(total_metered, 1.01 * total_most);
}

}  // namespace
}  // namespace halfwire
