// CudaDevice on a real GPU; skips with the reason where this machine has none. halfwire-cuda-check compares
// the codec's bits at length; here it is the device's own contract.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "device/device.h"
#include "wire/cuda_check/gpu.h"

namespace halfwire {
namespace {

using check::Buffer;
using check::Gpu;
using check::Stream;

class DeviceGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
#ifndef HALFWIRE_HAVE_KERNELS
    GTEST_SKIP() << "this build has no CUDA kernels";
#endif
    if (!check::openGpu(&gpu_, &why)) GTEST_SKIP() << "no GPU: " << why;
    auto made = makeCudaDevice(0);
    ASSERT_TRUE(made.ok()) << made.status().message();
    device_ = std::move(made).value();
  }

  static constexpr uint64_t kElements = 10000;

  static std::vector<float> values() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> out(kElements);
    for (float& v : out) v = normal(random);
    out[17] = std::bit_cast<float>(0x7f800000u);
    return out;
  }

  static QuantizeJob job(const void* in, void* out) {
    QuantizeJob j;
    j.type = DataType::kFp32;
    j.in = in;
    j.in_pitch = j.in_total = j.segment_elements = kElements;
    j.out = out;
    j.out_pitch = packetBytes(j.format, kElements);
    return j;
  }

  static std::vector<uint8_t> expected(const std::vector<float>& in) {
    std::vector<uint8_t> out(packetBytes(WireFormat{}, kElements));
    reference::quantize(job(in.data(), out.data()));
    return out;
  }

  Gpu gpu_;
  std::unique_ptr<Device> device_;
};

TEST_F(DeviceGpuTest, QuantizesIntoMemoryOfItsOwn) {
  const std::vector<float> in = values();
  const std::vector<uint8_t> want = expected(in);
  const Stream stream(gpu_);
  const Buffer elements(gpu_, in.size() * 4);
  elements.upload(in.data(), in.size() * 4);
  void* packet = nullptr;
  ASSERT_TRUE(device_->allocate(want.size(), &packet).ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(packet) % 256, 0u);
  ASSERT_TRUE(device_->quantize(job(elements.at(), packet), stream.get()).ok());
  stream.synchronize();
  std::vector<uint8_t> got(want.size());
  gpu_.must("cuMemcpyDtoH", gpu_.cuMemcpyDtoH(got.data(), reinterpret_cast<uintptr_t>(packet), got.size()));
  EXPECT_EQ(got, want);
  device_->release(packet);
  EXPECT_GT(device_->freeBytes(), size_t{1} << 20);
}

TEST_F(DeviceGpuTest, PerturbsAsTheHostDoes) {
  const Stream stream(gpu_);
  std::mt19937 random(5);
  for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32}) {
    // Every value of 16 bits, as many random ones of 32; odd lengths and starts.
    std::vector<uint32_t> words(65536);
    for (uint32_t& w : words) w = static_cast<uint32_t>(random());
    if (type != DataType::kFp32) {
      for (uint32_t i = 0; i < words.size(); ++i) words[i] = (2 * i) % 65536 | (2 * i + 1) % 65536 << 16;
    }
    const size_t bytes = words.size() * 4;
    const Buffer elements(gpu_, bytes);
    for (const uint64_t start : {0u, 1u}) {
      elements.upload(words.data(), bytes);
      std::vector<uint32_t> want = words;
      const uint64_t count = bytes / dataTypeBytes(type) - 3;
      const auto at = [&](void* base) { return static_cast<char*>(base) + start * dataTypeBytes(type); };
      perturb({type, at(want.data()), count, 77 + start});
      ASSERT_TRUE(device_->perturb({type, at(elements.at()), count, 77 + start}, stream.get()).ok());
      stream.synchronize();
      std::vector<uint32_t> got(words.size());
      elements.download(got.data(), bytes);
      EXPECT_EQ(got, want);
      EXPECT_NE(got, words);
    }
  }
}

TEST_F(DeviceGpuTest, ComparesAsTheHostDoes) {
  const Stream stream(gpu_);
  std::mt19937 random(7);
  void* sums = nullptr;
  void* host = nullptr;
  ASSERT_TRUE(device_->allocate(sizeof(ErrorSums), &sums).ok());
  ASSERT_TRUE(device_->allocateHost(sizeof(ErrorSums), &host).ok());
  for (const DataType type : {DataType::kBf16, DataType::kFp16, DataType::kFp32}) {
    for (const uint64_t elements : {1u, 129u, 70001u}) {
      const size_t bytes = elements * dataTypeBytes(type);
      // Bit patterns: numbers of every size, zeros, infinities and NaNs.
      std::vector<uint8_t> x(bytes), y(bytes);
      for (uint8_t& b : x) b = static_cast<uint8_t>(random());
      y = x;
      for (size_t i = 0; i < bytes; i += 3) y[i] = 0;
      if (type ==
          DataType::kFp32) {  // squares of the largest fp32 numbers are finite in fp64, their sums too
        for (size_t i = 3; i < bytes; i += 4) x[i] &= 0xbf, y[i] &= 0xbf;
      }
      ErrorSums want;
      compare({type, x.data(), y.data(), elements, &want});
      const Buffer exact(gpu_, bytes), other(gpu_, bytes);
      exact.upload(x.data(), bytes);
      other.upload(y.data(), bytes);
      EventHandle begin = nullptr, end = nullptr;
      ASSERT_TRUE(device_->createTimedEvent(&begin).ok());
      ASSERT_TRUE(device_->createTimedEvent(&end).ok());
      ASSERT_TRUE(device_->recordEvent(begin, stream.get()).ok());
      ASSERT_TRUE(device_->zero(sums, sizeof(ErrorSums), stream.get()).ok());
      ASSERT_TRUE(
          device_
              ->compare({type, exact.at(), other.at(), elements, static_cast<ErrorSums*>(sums)}, stream.get())
              .ok());
      ASSERT_TRUE(device_->copy(host, sums, sizeof(ErrorSums), stream.get()).ok());
      ASSERT_TRUE(device_->recordEvent(end, stream.get()).ok());
      stream.synchronize();
      float ms = -1;
      bool done = false;
      ASSERT_TRUE(device_->elapsed(begin, end, &ms, &done).ok());
      EXPECT_TRUE(done);
      EXPECT_GE(ms, 0);
      const auto& got = *static_cast<const ErrorSums*>(host);
      EXPECT_EQ(got.elements, want.elements);
      EXPECT_EQ(got.flushed, want.flushed);
      EXPECT_EQ(got.not_finite, want.not_finite);
      for (const auto& [a, b] : {std::pair(got.exact_squares, want.exact_squares),
                                 {got.other_squares, want.other_squares},
                                 {got.error_squares, want.error_squares},
                                 {got.worst_block, want.worst_block}})
        EXPECT_NEAR(a, b, 1e-12 * b);
      EXPECT_NEAR(got.product, want.product, 1e-12 * want.exact_squares);
      device_->destroyEvent(begin);
      device_->destroyEvent(end);
    }
  }
  device_->releaseHost(host);
  device_->release(sums);
}

TEST_F(DeviceGpuTest, WorksFromAThreadWithoutAContext) {
  const std::vector<float> in = values();
  const Stream stream(gpu_);
  const Buffer elements(gpu_, in.size() * 4);
  elements.upload(in.data(), in.size() * 4);
  const Buffer packet(gpu_, packetBytes(WireFormat{}, kElements));
  gpu_.must("cuCtxSetCurrent", gpu_.cuCtxSetCurrent(nullptr));
  EXPECT_TRUE(device_->quantize(job(elements.at(), packet.at()), stream.get()).ok());
  EventHandle event = nullptr;
  EXPECT_TRUE(device_->createEvent(&event).ok());
  EXPECT_TRUE(device_->recordEvent(event, stream.get()).ok());
  EXPECT_TRUE(device_->synchronizeEvent(event).ok());
  device_->destroyEvent(event);
  cuda::CUcontext current = nullptr;
  gpu_.must("cuCtxGetCurrent", gpu_.driver.cuCtxGetCurrent(&current));
  EXPECT_EQ(current, nullptr) << "the caller's context is restored";
  gpu_.must("cuCtxSetCurrent", gpu_.cuCtxSetCurrent(gpu_.context));
  std::vector<uint8_t> got(packet.size());
  packet.download(got.data(), got.size());
  EXPECT_EQ(got, expected(in));
}

TEST_F(DeviceGpuTest, CaptureRecordsLaunchesAndReplaysThem) {
  const std::vector<float> in = values();
  const Stream stream(gpu_);
  const Buffer elements(gpu_, in.size() * 4);
  elements.upload(in.data(), in.size() * 4);
  const Buffer packet(gpu_, packetBytes(WireFormat{}, kElements));
  uint64_t capture = 1;
  ASSERT_TRUE(device_->captureOf(stream.get(), &capture).ok());
  EXPECT_EQ(capture, 0u);
  constexpr int kCaptureModeGlobal = 0;
  gpu_.must("begin", gpu_.cuStreamBeginCapture(stream.get(), kCaptureModeGlobal));
  ASSERT_TRUE(device_->captureOf(stream.get(), &capture).ok());
  EXPECT_NE(capture, 0u);
  EXPECT_TRUE(device_->quantize(job(elements.at(), packet.at()), stream.get()).ok());
  void* memory = nullptr;  // a communicator may be made while another stream captures
  EXPECT_TRUE(device_->allocate(4096, &memory).ok());
  device_->release(memory);
  check::CUgraph graph = nullptr;
  check::CUgraphExec exec = nullptr;
  gpu_.must("end", gpu_.cuStreamEndCapture(stream.get(), &graph));
  gpu_.must("instantiate", gpu_.cuGraphInstantiate(&exec, graph, 0));
  gpu_.must("memset", gpu_.cuMemsetD8Async(packet.address(), 0xcd, packet.size(), stream.get()));
  gpu_.must("launch", gpu_.cuGraphLaunch(exec, stream.get()));
  stream.synchronize();
  std::vector<uint8_t> got(packet.size());
  packet.download(got.data(), got.size());
  EXPECT_EQ(got, expected(in));
  (void)gpu_.cuGraphExecDestroy(exec);
  (void)gpu_.cuGraphDestroy(graph);
}

// A graph takes its turn with work outside it: it waits for what was recorded before its launch, and what
// comes after its launch waits for it.
TEST_F(DeviceGpuTest, EventsOutsideACaptureOrderItsRuns) {
  const std::vector<float> in = values();
  const Stream inside(gpu_), outside(gpu_);
  const Buffer elements(gpu_, in.size() * 4), packet(gpu_, packetBytes(WireFormat{}, kElements)),
      back(gpu_, in.size() * 4), large(gpu_, 256u << 20);
  elements.upload(in.data(), in.size() * 4);
  EventHandle before = nullptr, after = nullptr;
  ASSERT_TRUE(device_->createEvent(&before).ok());
  ASSERT_TRUE(device_->createEvent(&after).ok());
  const auto slowly = [&](const Stream& stream) {
    for (int i = 0; i < 20; ++i)
      gpu_.must("memset", gpu_.cuMemsetD8Async(large.address(), 1, large.size(), stream.get()));
  };
  constexpr int kCaptureModeGlobal = 0;
  gpu_.must("begin", gpu_.cuStreamBeginCapture(inside.get(), kCaptureModeGlobal));
  EXPECT_TRUE(device_->waitEventOutside(inside.get(), before).ok());
  slowly(inside);
  EXPECT_TRUE(device_->quantize(job(elements.at(), packet.at()), inside.get()).ok());
  EXPECT_TRUE(device_->recordEventOutside(after, inside.get()).ok());
  check::CUgraph graph = nullptr;
  check::CUgraphExec exec = nullptr;
  gpu_.must("end", gpu_.cuStreamEndCapture(inside.get(), &graph));
  gpu_.must("instantiate", gpu_.cuGraphInstantiate(&exec, graph, 0));
  DequantizeJob decode;
  decode.type = DataType::kFp32;
  decode.in = packet.at();
  decode.segment_elements = decode.out_pitch = decode.out_total = kElements;
  decode.out = back.at();
  std::vector<float> want(kElements), got(kElements);
  const std::vector<uint8_t> bytes = expected(in);
  DequantizeJob reference_job = decode;
  reference_job.in = bytes.data();
  reference_job.out = want.data();
  reference::dequantize(reference_job);
  for (int turn = 0; turn < 5; ++turn) {
    slowly(outside);
    gpu_.must("memset", gpu_.cuMemsetD8Async(packet.address(), 0xcd, packet.size(), outside.get()));
    ASSERT_TRUE(device_->recordEvent(before, outside.get()).ok());
    gpu_.must("launch", gpu_.cuGraphLaunch(exec, inside.get()));
    ASSERT_TRUE(device_->waitEvent(outside.get(), after).ok());
    ASSERT_TRUE(device_->dequantize(decode, outside.get()).ok());
    outside.synchronize();
    back.download(got.data(), got.size() * 4);
    ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * 4), 0) << "turn " << turn;
  }
  (void)gpu_.cuGraphExecDestroy(exec);
  (void)gpu_.cuGraphDestroy(graph);
  device_->destroyEvent(before);
  device_->destroyEvent(after);
}

TEST_F(DeviceGpuTest, EventsOrderStreams) {
  const std::vector<float> in = values();
  const Stream first(gpu_);
  const Stream second(gpu_);
  const Buffer elements(gpu_, in.size() * 4);
  elements.upload(in.data(), in.size() * 4);
  const Buffer packet(gpu_, packetBytes(WireFormat{}, kElements));
  const Buffer back(gpu_, in.size() * 4);
  EventHandle event = nullptr;
  ASSERT_TRUE(device_->createEvent(&event).ok());
  ASSERT_TRUE(device_->quantize(job(elements.at(), packet.at()), first.get()).ok());
  ASSERT_TRUE(device_->recordEvent(event, first.get()).ok());
  ASSERT_TRUE(device_->waitEvent(second.get(), event).ok());
  DequantizeJob decode;
  decode.type = DataType::kFp32;
  decode.in = packet.at();
  decode.segment_elements = decode.out_pitch = decode.out_total = kElements;
  decode.out = back.at();
  ASSERT_TRUE(device_->dequantize(decode, second.get()).ok());
  second.synchronize();
  std::vector<float> want(kElements);
  const std::vector<uint8_t> bytes = expected(in);
  decode.in = bytes.data();
  decode.out = want.data();
  reference::dequantize(decode);
  std::vector<float> got(kElements);
  back.download(got.data(), got.size() * 4);
  EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * 4), 0);
  device_->destroyEvent(event);
}

TEST_F(DeviceGpuTest, PathFollowsTheEnvironment) {
  ASSERT_EQ(setenv("HALFWIRE_CODEC_PATH", "software", 1), 0);
  auto software = makeCudaDevice(0);
  ASSERT_TRUE(software.ok()) << software.status().message();
  EXPECT_STREQ(software.value()->codecName(), "software");
  setenv("HALFWIRE_CODEC_PATH", "fast", 1);
  EXPECT_EQ(makeCudaDevice(0).status().code(), StatusCode::kInvalidArgument);
  setenv("HALFWIRE_CODEC_PATH", "hardware", 1);
  const auto hardware = makeCudaDevice(0);
  if (gpu_.capability >= 89 && hardware.ok()) {
    EXPECT_STREQ(hardware.value()->codecName(), "hardware");
  } else {
    EXPECT_EQ(hardware.status().code(), StatusCode::kUnavailable);
  }
  unsetenv("HALFWIRE_CODEC_PATH");
}

TEST_F(DeviceGpuTest, RefusesWrongJobsBeforeTheGpuSeesThem) {
  const Stream stream(gpu_);
  const Buffer memory(gpu_, 1 << 20);
  QuantizeJob wrong = job(memory.at(2), memory.at(1 << 16));
  EXPECT_EQ(device_->quantize(wrong, stream.get()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(makeCudaDevice(9999).ok(), false);
  EXPECT_TRUE(device_->quantize(QuantizeJob{}, stream.get()).ok());
  stream.synchronize();
}

TEST(MakeCudaDeviceTest, SaysWhyWithoutADriver) {
  if (dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) GTEST_SKIP() << "this machine has a CUDA driver";
  const auto made = makeCudaDevice(0);
  EXPECT_EQ(made.status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(made.status().message().empty());
}

}  // namespace
}  // namespace halfwire
