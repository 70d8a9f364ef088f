// The meter on a fake runtime, whose events complete when the test says: what it records, when it must not
// touch anything, and what reaches the run log.
#include "meter/meter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>

namespace halfwire::meter {
namespace {

using ::testing::HasSubstr;

struct FakeRuntime {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t last_error = cudaSuccess;
  double clock_ms = 0;                    // what the next record stamps
  std::map<cudaEvent_t, double> stamped;  // of recorded events
  std::set<cudaEvent_t> unfinished;
  bool finish = true;  // whether records complete at once
  int created = 0, records = 0, queries = 0;
};
FakeRuntime fake;

cudaError_t failed(cudaError_t error) {
  fake.last_error = error;
  return error;
}

const CudaCalls kCalls = {
    .eventCreate =
        [](cudaEvent_t* event, unsigned) {
          *event = reinterpret_cast<cudaEvent_t>(static_cast<uintptr_t>(0x100000 + 16 * ++fake.created));
          return cudaSuccess;
        },
    .eventRecord =
        [](cudaEvent_t event, cudaStream_t) {
          ++fake.records;
          fake.stamped[event] = fake.clock_ms;
          if (!fake.finish) fake.unfinished.insert(event);
          return cudaSuccess;
        },
    .eventQuery =
        [](cudaEvent_t event) {
          ++fake.queries;
          return fake.unfinished.contains(event) ? failed(cudaErrorNotReady) : cudaSuccess;
        },
    .eventElapsed =
        [](float* ms, cudaEvent_t from, cudaEvent_t to) {
          if (fake.unfinished.contains(from) || fake.unfinished.contains(to))
            return failed(cudaErrorNotReady);
          *ms = static_cast<float>(fake.stamped.at(to) - fake.stamped.at(from));
          return cudaSuccess;
        },
    .isCapturing =
        [](cudaStream_t, cudaStreamCaptureStatus* status) {
          *status = fake.capture;
          return cudaSuccess;
        },
    .exchangeCaptureMode = [](cudaStreamCaptureMode*) { return cudaSuccess; },
    .getDevice =
        [](int* device) {
          *device = 0;
          return cudaSuccess;
        },
    .peekLastError = [] { return fake.last_error; },
    .getLastError = [] { return std::exchange(fake.last_error, cudaSuccess); },
};

const auto kComputeStream = reinterpret_cast<cudaStream_t>(0x1000);
const auto kCommStream = reinterpret_cast<cudaStream_t>(0x2000);
const auto kOtherStream = reinterpret_cast<cudaStream_t>(0x3000);
const auto kDone = reinterpret_cast<cudaEvent_t>(0x10);

class MeterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake = FakeRuntime{};
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    unsetenv("CUDA_LAUNCH_BLOCKING");
    auto made = RunLog::create("");
    ASSERT_TRUE(made.ok());
    log_ = std::move(made).value();
    RunLogCommunicator* comm = log_->addCommunicator();
    row_ = RunLog::sizeRow(*comm, CollectiveOp::kAllReduce, ncclBfloat16, 1 << 20);
  }
  // Up to the first step that is sampled and counts.
  void startSampling() {
    meter_.start(&log_->file(), 1);
    ASSERT_TRUE(meter_.on());
    for (uint32_t i = 0; i <= kWarmupSteps; ++i) meter_.step();
    meter_.launches(keyOf(kComputeStream), 100);
    meter_.launches(keyOf(kOtherStream), 100);
  }
  void collective(cudaStream_t stream = kCommStream) {
    const MeterCall call{stream, row_, 7};
    MeterScope scope;
    meter_.beginCollectives(&call, 1, &scope);
    meter_.endCollectives(&scope);
  }
  void record(cudaEvent_t event, cudaStream_t stream) {
    meter_.record(kCalls, reinterpret_cast<EventKey>(event), keyOf(stream));
  }
  Bracket* begin(cudaEvent_t event, cudaStream_t stream) {
    return meter_.beginWait(kCalls, reinterpret_cast<EventKey>(event), stream, keyOf(stream));
  }
  // A wait on `stream` that is reached and over at these times, and does not pass at once.
  void wait(double from_ms, double to_ms, cudaStream_t stream = kComputeStream) {
    fake.unfinished.insert(kDone);
    fake.finish = false;
    fake.clock_ms = from_ms;
    Bracket* bracket = begin(kDone, stream);
    ASSERT_NE(bracket, nullptr);
    fake.clock_ms = to_ms;
    meter_.close(bracket, bracket->opened_ns, true);
    fake.finish = true;
  }
  void finishAll() { fake.unfinished.clear(); }
  const RunLogStep& step(uint64_t n) { return log_->file().step[n % kRunLogSteps]; }

  std::unique_ptr<RunLog> log_;
  RunLogSize* row_ = nullptr;
  Meter meter_;
};

TEST_F(MeterTest, EachMomentCountsOnce) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  wait(10, 14);
  wait(12, 15, kOtherStream);
  wait(20, 21);
  finishAll();
  meter_.step();
  const RunLogStep& s = step(kWarmupSteps);
  EXPECT_EQ(s.number, kWarmupSteps + 1);
  ASSERT_EQ(s.measured, 1u);
  EXPECT_NEAR(static_cast<double>(s.exposed_ns.load()), 6e6, 1e3);
  EXPECT_NEAR(static_cast<double>(row_->exposed_ns.load()), 6e6, 1e3);
  EXPECT_EQ(row_->waits, 3u);
  EXPECT_EQ(row_->sampled_calls, 1u);
}

TEST_F(MeterTest, EventsAreReadWhenTheyAreThere) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  wait(10, 14);
  meter_.step();
  EXPECT_EQ(step(kWarmupSteps).measured, 0u);
  EXPECT_EQ(fake.last_error, cudaSuccess) << "not ready is no error of the program's";
  finishAll();
  meter_.step();
  EXPECT_EQ(step(kWarmupSteps).measured, 1u);
  // The events go back to the pool: a hundred steps need no more.
  const int created = fake.created;
  for (int i = 0; i < 100; ++i) {
    collective();
    record(kDone, kCommStream);
    wait(10, 14);
    finishAll();
    meter_.step();
  }
  EXPECT_EQ(fake.created, created);
}

TEST_F(MeterTest, NothingIsTouchedWhileCapturing) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  for (const auto status : {cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated}) {
    fake.capture = status;
    EXPECT_EQ(begin(kDone, kComputeStream), nullptr);
  }
  EXPECT_EQ(fake.records + fake.queries + fake.created, 0);
  EXPECT_EQ(log_->file().meter.captured, 2u);
}

TEST_F(MeterTest, TheProgramsErrorStaysItsLastError) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  fake.last_error = cudaErrorInvalidValue;
  EXPECT_EQ(begin(kDone, kComputeStream), nullptr);
  EXPECT_EQ(fake.last_error, cudaErrorInvalidValue);
  EXPECT_EQ(fake.records + fake.queries, 0);
  EXPECT_EQ(log_->file().meter.unmeasured, 1u);
}

TEST_F(MeterTest, AnEventThatHasFiredNeedsNoBracket) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  EXPECT_EQ(begin(kDone, kComputeStream), nullptr);
  EXPECT_EQ(fake.records, 0);
  meter_.step();
  EXPECT_EQ(step(kWarmupSteps).waits, 1u);
  EXPECT_EQ(step(kWarmupSteps).exposed_ns, 0u);
  EXPECT_EQ(step(kWarmupSteps).measured, 1u);
}

TEST_F(MeterTest, TheHostsOwnTimeIsNoWaiting) {
  startSampling();
  collective();
  record(kDone, kCommStream);
  // The stream passes the first event at once; the host needs 3 ms for the wait, which then takes 5 ms.
  fake.unfinished.insert(kDone);
  fake.clock_ms = 10;
  Bracket* bracket = begin(kDone, kComputeStream);
  ASSERT_NE(bracket, nullptr);
  fake.clock_ms = 218;
  fake.finish = false;
  meter_.close(bracket, bracket->opened_ns + 3'000'000, true);
  finishAll();
  meter_.step();
  EXPECT_NEAR(static_cast<double>(step(kWarmupSteps).exposed_ns.load()), 205e6, 1e5);
}

TEST_F(MeterTest, ACollectiveOnAComputeStreamIsBracketedItself) {
  startSampling();
  record(kDone, kComputeStream);  // tells the meter which runtime the program uses
  const MeterCall call{kComputeStream, row_, 7};
  MeterScope scope;
  fake.finish = false;
  fake.clock_ms = 5;
  meter_.beginCollectives(&call, 1, &scope);
  ASSERT_EQ(scope.count, 1);
  fake.clock_ms = 8;
  meter_.endCollectives(&scope);
  finishAll();
  meter_.step();
  EXPECT_NEAR(static_cast<double>(step(kWarmupSteps).exposed_ns.load()), 3e6, 1e3);
}

TEST_F(MeterTest, StepsThatAreNotSampledAreNotTouched) {
  meter_.start(&log_->file(), 16);
  for (uint32_t i = 0; i < 2000; ++i) {
    meter_.step();
    meter_.launches(keyOf(kComputeStream), 1);
    collective();
    record(kDone, kCommStream);
    const int before = fake.records;
    fake.unfinished.insert(kDone);
    if (Bracket* b = begin(kDone, kComputeStream)) meter_.close(b, b->opened_ns, true);
    finishAll();
    const bool touched = fake.records != before;
    meter_.step();
    EXPECT_EQ(step(log_->file().meter.steps - 2).sampled != 0, touched);
  }
  int sampled = 0;
  for (uint64_t n = kWarmupSteps; n < kWarmupSteps + 16 * 200; ++n) sampled += step(n).sampled;
  EXPECT_EQ(sampled, 200) << "one in each run of 16";
}

TEST_F(MeterTest, RangesAreStepsUntilTheyStop) {
  meter_.start(&log_->file(), 1);
  const RunLogMeter& m = log_->file().meter;
  const auto calls = [&](int n) {
    for (int i = 0; i < n; ++i) collective();  // alike: a guess would make each a step
  };
  calls(100);
  EXPECT_EQ(m.source, static_cast<uint32_t>(StepSource::kDetected));
  meter_.range("iteration");
  EXPECT_EQ(m.source, static_cast<uint32_t>(StepSource::kRange));
  const uint64_t guessed = m.steps;
  for (int i = 0; i < 9; ++i) {
    calls(10);
    meter_.range("step");  // inside the other
    calls(10);
    meter_.range("iteration");
  }
  EXPECT_STREQ(m.range, "iteration");
  EXPECT_EQ(m.steps, guessed + 9);
  EXPECT_EQ(m.checked, 0u);
  // An evaluation of many calls is in the step before it; then they have stopped, and the next name counts.
  calls(64 * 20);
  EXPECT_EQ(m.steps, guessed + 9);
  calls(10);
  EXPECT_EQ(m.source, static_cast<uint32_t>(StepSource::kDetected));
  meter_.range("step");
  EXPECT_STREQ(m.range, "step");
  EXPECT_EQ(m.source, static_cast<uint32_t>(StepSource::kRange));
  meter_.step();
  const uint64_t marked = m.steps;
  meter_.range("step");
  EXPECT_EQ(m.steps, marked);
  EXPECT_EQ(m.source, static_cast<uint32_t>(StepSource::kMarked));
}

TEST_F(MeterTest, RefusesWhereItWouldChangeWhatItMeasures) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  meter_.start(&log_->file(), 1);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  EXPECT_FALSE(meter_.on());
  EXPECT_EQ(log_->file().meter.state, static_cast<uint32_t>(MeterState::kRefused));
  EXPECT_THAT(log_->file().meter.words, HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS=1"));
}

}  // namespace
}  // namespace halfwire::meter
