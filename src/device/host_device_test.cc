// HostDevice against a small engine: one FIFO that runs when the test says so.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "device/device.h"

namespace halfwire {
namespace {

// What the fake engine did; its functions are plain pointers, so the state is the test's only global.
struct FakeEngine {
  std::deque<std::pair<cudaHostFn_t, void*>> queue;
  int device = 1;
  std::vector<int> allocated_on;
  int events = 0;
  int streams = 0;
  cudaError_t launch_error = cudaSuccess;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

  void runAll() {
    while (!queue.empty()) {
      const auto [function, argument] = queue.front();
      queue.pop_front();
      function(argument);
    }
  }
};

FakeEngine* fake = nullptr;

const HalfwireHostEngine kTable = {
    .version = 1,
    .bytes = sizeof(HalfwireHostEngine),
    .malloc =
        [](void** out, size_t bytes) {
          if (bytes > (size_t{1} << 40)) return cudaErrorMemoryAllocation;
          fake->allocated_on.push_back(fake->device);
          *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
          return cudaSuccess;
        },
    .free =
        [](void* pointer) {
          std::free(pointer);
          return cudaSuccess;
        },
    .launchHostFunc =
        [](cudaStream_t, cudaHostFn_t function, void* argument) {
          if (fake->launch_error == cudaSuccess) fake->queue.emplace_back(function, argument);
          return fake->launch_error;
        },
    .eventCreate =
        [](cudaEvent_t* out, unsigned flags) {
          EXPECT_TRUE(flags == cudaEventDisableTiming || flags == cudaEventDefault);
          *out = reinterpret_cast<cudaEvent_t>(static_cast<uintptr_t>(++fake->events));
          return cudaSuccess;
        },
    .eventDestroy =
        [](cudaEvent_t) {
          --fake->events;
          return cudaSuccess;
        },
    .eventRecord = [](cudaEvent_t, cudaStream_t) { return cudaSuccess; },
    .streamWaitEvent = [](cudaStream_t, cudaEvent_t, unsigned) { return cudaErrorInvalidResourceHandle; },
    .streamIsCapturing =
        [](cudaStream_t, cudaStreamCaptureStatus* out) {
          *out = fake->capture;
          return cudaSuccess;
        },
    .getDevice =
        [](int* out) {
          *out = fake->device;
          return cudaSuccess;
        },
    .setDevice =
        [](int device) {
          fake->device = device;
          return cudaSuccess;
        },
    .eventSynchronize =
        [](cudaEvent_t) {
          fake->runAll();
          return cudaSuccess;
        },
    .streamCreate =
        [](cudaStream_t* stream, unsigned flags) {
          EXPECT_EQ(flags, unsigned{cudaStreamNonBlocking});
          ++fake->streams;
          *stream = reinterpret_cast<cudaStream_t>(fake);
          return cudaSuccess;
        },
    .streamSynchronize =
        [](cudaStream_t) {
          fake->runAll();
          return cudaSuccess;
        },
    .streamDestroy =
        [](cudaStream_t) {
          --fake->streams;
          return cudaSuccess;
        },
    .eventQuery = [](cudaEvent_t) { return fake->queue.empty() ? cudaSuccess : cudaErrorNotReady; },
    .eventElapsedTime =
        [](float* ms, cudaEvent_t, cudaEvent_t) {
          *ms = 2.5f;
          return cudaSuccess;
        },
};

class HostDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    fake = &engine_;
    auto made = makeHostDevice(&kTable, 1);
    ASSERT_TRUE(made.ok()) << made.status().message();
    device_ = std::move(made).value();
  }

  static QuantizeJob quantizeJob(const std::vector<float>& in, void* packet) {
    QuantizeJob job;
    job.type = DataType::kFp32;
    job.in = in.data();
    job.in_total = job.segment_elements = in.size();
    job.out = packet;
    job.out_pitch = packetBytes(job.format, in.size());
    return job;
  }

  FakeEngine engine_;
  std::unique_ptr<Device> device_;
};

struct alignas(16) Packet {
  uint8_t bytes[1024] = {};
};

TEST_F(HostDeviceTest, JobsRunInStreamOrderAfterTheCallReturned) {
  std::vector<float> in(300);
  for (size_t i = 0; i < in.size(); ++i) in[i] = 0.25f * static_cast<float>(i) - 30.0f;
  const QuantizeJob quantize = quantizeJob(in, nullptr);
  Packet direct;
  Packet queued;
  QuantizeJob job = quantize;
  job.out = direct.bytes;
  reference::quantize(job);
  const Packet empty;

  job.out = queued.bytes;
  ASSERT_TRUE(device_->quantize(job, nullptr).ok());
  job.out = nullptr;  // the device keeps a copy of its own
  ReduceJob sum;
  sum.type = DataType::kFp32;
  sum.packets = 2;
  sum.in = queued.bytes;
  sum.in_pitch = 0;
  sum.elements = in.size();
  sum.to_packet = false;
  std::vector<float> out(in.size(), -1.0f);
  sum.out = out.data();
  ASSERT_TRUE(device_->reduce(sum, nullptr).ok());
  EXPECT_EQ(std::memcmp(queued.bytes, empty.bytes, sizeof(empty.bytes)), 0);

  engine_.runAll();
  EXPECT_EQ(std::memcmp(queued.bytes, direct.bytes, sizeof(direct.bytes)), 0);
  for (size_t i = 0; i < in.size(); ++i) EXPECT_NEAR(out[i], 2 * in[i], 0.13f * std::abs(in[i]) + 0.2f) << i;
}

TEST_F(HostDeviceTest, MoreJobsThanThePoolHoldsAndJobsThatOutliveTheDevice) {
  const std::vector<float> in(40, 1.0f);
  std::vector<Packet> packets(200);
  for (int round = 0; round < 2; ++round) {
    for (Packet& packet : packets) {
      packet = {};
      ASSERT_TRUE(device_->quantize(quantizeJob(in, packet.bytes), nullptr).ok());
    }
    if (round == 1) device_.reset();
    engine_.runAll();
    for (const Packet& packet : packets) EXPECT_EQ(packet.bytes[39], 0x7e) << "448 times the scale";
  }
}

TEST_F(HostDeviceTest, EngineErrorsAreStatuses) {
  const std::vector<float> in(40, 1.0f);
  Packet packet;
  engine_.launch_error = cudaErrorInvalidResourceHandle;
  const Status status = device_->quantize(quantizeJob(in, packet.bytes), nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("cudaLaunchHostFunc"), std::string::npos);
  EXPECT_FALSE(device_->waitEvent(nullptr, nullptr).ok());
  void* pointer = nullptr;
  EXPECT_EQ(device_->allocate(size_t{1} << 41, &pointer).code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(pointer, nullptr);
}

TEST_F(HostDeviceTest, AllocatesOnItsOwnDeviceAndRestoresTheCallers) {
  engine_.device = 3;
  void* pointer = nullptr;
  ASSERT_TRUE(device_->allocate(100, &pointer).ok());
  EXPECT_EQ(engine_.allocated_on, std::vector<int>{1});
  EXPECT_EQ(engine_.device, 3);
  device_->release(pointer);
}

TEST_F(HostDeviceTest, EventsAndCapture) {
  EventHandle event = nullptr;
  ASSERT_TRUE(device_->createEvent(&event).ok());
  EXPECT_NE(event, nullptr);
  EXPECT_TRUE(device_->recordEvent(event, nullptr).ok());
  EXPECT_TRUE(device_->synchronizeEvent(event).ok());
  device_->destroyEvent(event);
  EXPECT_EQ(engine_.events, 0);
  uint64_t capture = 1;
  ASSERT_TRUE(device_->captureOf(nullptr, &capture).ok());
  EXPECT_EQ(capture, 0u);
  engine_.capture = cudaStreamCaptureStatusInvalidated;
  ASSERT_TRUE(device_->captureOf(nullptr, &capture).ok());
  EXPECT_NE(capture, 0u);
}

TEST_F(HostDeviceTest, AStreamEndsAfterItsWork) {
  StreamHandle stream = nullptr;
  ASSERT_TRUE(device_->createStream(&stream).ok());
  EXPECT_EQ(engine_.streams, 1);
  bool ran = false;
  engine_.queue.emplace_back([](void* flag) { *static_cast<bool*>(flag) = true; }, &ran);
  EXPECT_TRUE(device_->finishStream(stream).ok());
  EXPECT_TRUE(ran);
  EXPECT_EQ(engine_.streams, 0);
}

TEST_F(HostDeviceTest, RefusesWrongJobs) {
  const std::vector<float> in(300, 1.0f);
  Packet packet;
  const QuantizeJob good = quantizeJob(in, packet.bytes);
  const auto refused = [&](auto job, auto change) {
    change(job);
    Status status;
    if constexpr (std::is_same_v<decltype(job), QuantizeJob>) {
      status = device_->quantize(job, nullptr);
    } else {
      status = device_->reduce(job, nullptr);
    }
    return status.code() == StatusCode::kInvalidArgument && engine_.queue.empty();
  };
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.format.block = 48; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.format.block = 0; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.in = nullptr; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.in = static_cast<const char*>(j.in) + 2; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.out = static_cast<char*>(j.out) + 8; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) { j.in_total = uint64_t{1} << 60; }));
  EXPECT_TRUE(refused(good, [](QuantizeJob& j) {
    j.segments = 3;
    j.segment_elements = j.in_pitch = 100;
    j.out_pitch = 100;
  }));
  ReduceJob sum;
  sum.packets = 2;
  sum.in = packet.bytes;
  sum.in_pitch = 512;
  sum.elements = 256;
  sum.out = packet.bytes;
  EXPECT_TRUE(refused(sum, [](ReduceJob& j) { j.packets = 0; }));
  EXPECT_TRUE(refused(sum, [](ReduceJob& j) { j.in_pitch = 520; }));
  EXPECT_TRUE(refused(sum, [](ReduceJob& j) { j.own_index = 1; }));
  EXPECT_TRUE(device_->quantize(QuantizeJob{}, nullptr).ok()) << "an empty job needs no buffers";
  engine_.runAll();
}

TEST_F(HostDeviceTest, CopiesZeroesAndComparesInStreamOrder) {
  std::vector<float> a(300, 2.0f), b(300);
  b[7] = 3.0f;
  ErrorSums sums;
  sums.elements = 99;
  void* host = nullptr;
  ASSERT_TRUE(device_->allocateHost(sizeof(ErrorSums), &host).ok());
  EXPECT_TRUE(device_->copy(b.data() + 10, a.data() + 10, 290 * 4, nullptr).ok());
  EXPECT_TRUE(device_->zero(&sums, sizeof sums, nullptr).ok());
  EXPECT_TRUE(device_->compare({DataType::kFp32, a.data(), b.data(), a.size(), &sums}, nullptr).ok());
  EXPECT_TRUE(device_->copy(host, &sums, sizeof sums, nullptr).ok());
  EXPECT_TRUE(device_->copy(host, nullptr, 0, nullptr).ok());
  EventHandle timed = nullptr;
  ASSERT_TRUE(device_->createTimedEvent(&timed).ok());
  float ms = 0;
  bool done = true;
  EXPECT_TRUE(device_->elapsed(timed, timed, &ms, &done).ok());
  EXPECT_FALSE(done);
  EXPECT_EQ(sums.elements, 99u) << "nothing has run yet";
  engine_.runAll();
  const auto* read = static_cast<ErrorSums*>(host);
  EXPECT_EQ(read->elements, 300u);
  EXPECT_EQ(read->flushed, 9u);
  EXPECT_EQ(read->error_squares, 9 * 4.0 + 1.0);
  EXPECT_TRUE(device_->elapsed(timed, timed, &ms, &done).ok());
  EXPECT_TRUE(done);
  EXPECT_EQ(ms, 2.5f);
  EXPECT_FALSE(device_->compare({DataType::kFp32, a.data(), nullptr, 1, &sums}, nullptr).ok());
  device_->destroyEvent(timed);
  device_->releaseHost(host);
}

TEST(MakeHostDeviceTest, RefusesOtherTables) {
  FakeEngine engine;
  fake = &engine;
  EXPECT_EQ(makeHostDevice(nullptr, 0).status().code(), StatusCode::kInvalidArgument);
  HalfwireHostEngine other = kTable;
  other.version = 2;
  EXPECT_EQ(makeHostDevice(&other, 0).status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace halfwire
