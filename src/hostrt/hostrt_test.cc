// The host runtime against CUDA's documented semantics. Every test runs in a child process: the library reads
// the environment once.
#include "hostrt/hostrt.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "abi/cuda_runtime.h"
#include "hostrt/isolated.h"

namespace {

using namespace std::chrono_literals;
using halfwire::testing::runIsolated;
using Clock = std::chrono::steady_clock;

// Work on a stream that lasts until the test opens it.
class Gate {
 public:
  static void wait(void* gate) { static_cast<Gate*>(gate)->pass(); }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool reached() {
    std::lock_guard lock(mutex_);
    return reached_;
  }

 private:
  void pass() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.wait(lock, [&] { return open_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, reached_ = false;
};

void setFlag(void* flag) { *static_cast<std::atomic<int>*>(flag) = 1; }

cudaStream_t makeStream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
  return stream;
}
cudaEvent_t makeEvent(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, flags), cudaSuccess);
  return event;
}
void launch(cudaStream_t stream, Gate& gate) {
  EXPECT_EQ(cudaLaunchHostFunc(stream, Gate::wait, &gate), cudaSuccess);
}
void launch(cudaStream_t stream, std::atomic<int>& flag) {
  EXPECT_EQ(cudaLaunchHostFunc(stream, setFlag, &flag), cudaSuccess);
}

// Whether `condition` comes true within a time that is long for what it waits for.
template <class Condition>
bool soon(Condition condition, Clock::duration limit = 5s) {
  const auto deadline = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}
// Long enough for a worker that is wrongly free to run.
void settle() { std::this_thread::sleep_for(50ms); }

#define ISOLATED(suite, name, environment, seconds)                                     \
  void suite##_##name();                                                                \
  TEST(suite, name) { EXPECT_TRUE(runIsolated(environment, suite##_##name, seconds)); } \
  void suite##_##name()
const halfwire::testing::Environment kDefault;

ISOLATED(Stream, EnqueueReturnsBeforeTheWorkIsDone, kDefault, 20) {
  cudaStream_t stream = makeStream();
  Gate gate;
  std::atomic<int> after{0};
  launch(stream, gate);
  launch(stream, after);
  EXPECT_TRUE(soon([&] { return gate.reached(); }));
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(after, 0);
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(after, 1);
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

ISOLATED(Stream, RunsInOrderAndAfterDestruction, kDefault, 20) {
  static std::vector<int> order;
  static int numbers[200];
  cudaStream_t stream = makeStream();
  Gate gate;
  launch(stream, gate);
  for (int i = 0; i < 200; ++i) {
    numbers[i] = i;
    cudaLaunchHostFunc(stream, [](void* p) { order.push_back(*static_cast<int*>(p)); }, &numbers[i]);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  gate.open();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(order.size(), 200u);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

ISOLATED(Event, NeverRecordedIsDone, kDefault, 20) {
  cudaEvent_t event = makeEvent();
  cudaStream_t stream = makeStream();
  std::atomic<int> flag{0};
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
  launch(stream, flag);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(flag, 1);
}

// A wait means the last record before the wait; recording the event again changes nothing for it.
ISOLATED(Event, WaitKeepsTheRecordItSaw, kDefault, 20) {
  cudaStream_t first = makeStream(), second = makeStream(), waiter = makeStream();
  cudaEvent_t event = makeEvent();
  Gate early, late;
  std::atomic<int> flag{0};
  launch(first, early);
  cudaEventRecord(event, first);
  cudaStreamWaitEvent(waiter, event, 0);
  launch(second, late);
  cudaEventRecord(event, second);
  launch(waiter, flag);
  settle();
  EXPECT_EQ(flag, 0);
  early.open();
  EXPECT_TRUE(soon([&] { return flag == 1; })) << "the wait moved to the later record";
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady) << "the event is its last record";
  late.open();
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
}

ISOLATED(Event, WaitAfterSecondRecordMeansTheSecond, kDefault, 20) {
  cudaStream_t first = makeStream(), second = makeStream(), waiter = makeStream();
  cudaEvent_t event = makeEvent();
  Gate gate;
  std::atomic<int> flag{0};
  cudaEventRecord(event, first);
  launch(second, gate);
  cudaEventRecord(event, second);
  cudaStreamWaitEvent(waiter, event, 0);
  launch(waiter, flag);
  settle();
  EXPECT_EQ(flag, 0);
  gate.open();
  EXPECT_TRUE(soon([&] { return flag == 1; }));
}

ISOLATED(Event, DestroyedWhileWaitedFor, kDefault, 20) {
  cudaStream_t stream = makeStream(), waiter = makeStream();
  cudaEvent_t event = makeEvent();
  Gate gate;
  std::atomic<int> flag{0};
  launch(stream, gate);
  cudaEventRecord(event, stream);
  cudaStreamWaitEvent(waiter, event, 0);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  launch(waiter, flag);
  settle();
  EXPECT_EQ(flag, 0);
  gate.open();
  EXPECT_TRUE(soon([&] { return flag == 1; }));
}

ISOLATED(Event, ElapsedTime, kDefault, 20) {
  cudaStream_t stream = makeStream();
  cudaEvent_t start = makeEvent(cudaEventDefault), end = makeEvent(cudaEventDefault), untimed = makeEvent();
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaErrorInvalidResourceHandle) << "never recorded";
  Gate gate;
  cudaEventRecord(start, stream);
  launch(stream, gate);
  cudaEventRecord(end, stream);
  cudaEventRecord(untimed, stream);
  EXPECT_TRUE(soon([&] { return gate.reached(); }));
  EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
  std::this_thread::sleep_for(30ms);
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaSuccess);
  EXPECT_GE(ms, 29.0f);
  EXPECT_LT(ms, 10000.0f);
  EXPECT_EQ(cudaEventElapsedTime(&ms, start, untimed), cudaErrorInvalidResourceHandle);
}

// Work on the NULL stream waits for all blocking streams and they for it; non-blocking streams do neither.
ISOLATED(LegacyStream, OrdersBlockingStreams, kDefault, 20) {
  cudaStream_t blocking = makeStream(cudaStreamDefault), free_stream = makeStream();
  Gate gate, legacy_gate;
  std::atomic<int> legacy{0}, blocked{0}, unblocked{0};
  launch(blocking, gate);
  launch(nullptr, legacy);
  launch(free_stream, unblocked);
  EXPECT_TRUE(soon([&] { return unblocked == 1; })) << "a non-blocking stream waited for the NULL stream";
  settle();
  EXPECT_EQ(legacy, 0) << "the NULL stream did not wait for a blocking stream";
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  EXPECT_EQ(legacy, 1);

  unblocked = 0;
  launch(cudaStreamLegacy, legacy_gate);
  launch(blocking, blocked);
  launch(free_stream, unblocked);
  EXPECT_TRUE(soon([&] { return unblocked == 1; }));
  settle();
  EXPECT_EQ(blocked, 0) << "a blocking stream did not wait for the NULL stream";
  legacy_gate.open();
  EXPECT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
  EXPECT_EQ(blocked, 1);
}

ISOLATED(LegacyStream, PerThreadStreamsAreDifferentStreams, kDefault, 20) {
  Gate gate;
  std::atomic<int> flag{0};
  launch(cudaStreamPerThread, gate);
  std::thread([&] {
    launch(cudaStreamPerThread, flag);
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
    EXPECT_EQ(flag, 1) << "two threads shared a per-thread stream";
  }).join();
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
}

ISOLATED(Device, StreamsAndEventsBelongToOne,
         (halfwire::testing::Environment{{"HALFWIRE_HOST_DEVICES", "3"}}), 20) {
  int count = 0, device = -1;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(2), cudaSuccess);
  std::thread([] {
    int other = -1;
    EXPECT_EQ(cudaGetDevice(&other), cudaSuccess);
    EXPECT_EQ(other, 0) << "the current device is the thread's own";
  }).join();
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 2);
  cudaStream_t on_two = makeStream();
  cudaEvent_t event_two = makeEvent();
  cudaSetDevice(0);
  cudaStream_t on_zero = makeStream();
  Gate gate;
  std::atomic<int> flag{0};
  launch(on_two, gate);
  EXPECT_EQ(cudaEventRecord(event_two, on_zero), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event_two, on_two), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "device 0 has nothing to do";
  EXPECT_EQ(cudaStreamWaitEvent(on_zero, event_two, 0), cudaSuccess) << "waits cross devices";
  launch(on_zero, flag);
  settle();
  EXPECT_EQ(flag, 0);
  gate.open();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(flag, 1);
}

ISOLATED(Memory, PointerAttributes, kDefault, 20) {
  cudaSetDevice(5);
  char *device = nullptr, *host = nullptr;
  EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&device), 1000), cudaSuccess);
  EXPECT_EQ(cudaMallocHost(reinterpret_cast<void**>(&host), 10), cudaSuccess);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(device) % 256, 0u);
  cudaPointerAttributes a{};
  EXPECT_EQ(cudaPointerGetAttributes(&a, device + 999), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeDevice);
  EXPECT_EQ(a.device, 5);
  EXPECT_EQ(a.devicePointer, device + 999);
  EXPECT_EQ(cudaPointerGetAttributes(&a, device + 1000), cudaSuccess);
  EXPECT_NE(a.devicePointer, device + 1000) << "one behind the end belongs to no allocation";
  EXPECT_EQ(cudaPointerGetAttributes(&a, host), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaPointerGetAttributes(&a, &a), cudaSuccess);
  EXPECT_EQ(a.type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaFree(host), cudaErrorInvalidValue) << "pinned memory has its own free";
  EXPECT_EQ(cudaFree(device + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
}

ISOLATED(Memory, CopiesFollowTheStreamAndPageableRules, kDefault, 20) {
  cudaStream_t stream = makeStream();
  char* device = nullptr;
  char pageable[4] = {1, 2, 3, 4}, back[4] = {};
  cudaMalloc(reinterpret_cast<void**>(&device), 4);
  Gate gate;
  launch(stream, gate);
  EXPECT_EQ(cudaMemcpyAsync(device, pageable, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
  std::memset(pageable, 9, 4);  // allowed: pageable sources are staged
  std::thread opener([&] {
    std::this_thread::sleep_for(20ms);
    gate.open();
  });
  EXPECT_EQ(cudaMemcpyAsync(back, device, 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(back[0], 1);
  EXPECT_EQ(back[3], 4);
  opener.join();
  EXPECT_EQ(cudaMemsetAsync(device, 7, 4, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(back, device, 4, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(back[2], 7);
  EXPECT_EQ(cudaMemset(device, 5, 4), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(back, device, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(back[1], 5);
  EXPECT_EQ(cudaMemcpy(nullptr, device, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
}

ISOLATED(Memory, FreeWaitsAndFreeAsyncIsOrdered, kDefault, 20) {
  cudaStream_t stream = makeStream();
  void *direct = nullptr, *ordered = nullptr;
  EXPECT_EQ(cudaMalloc(&direct, 64), cudaSuccess);
  EXPECT_EQ(cudaMallocAsync(&ordered, 64, stream), cudaSuccess);
  Gate gate;
  launch(stream, gate);
  EXPECT_EQ(cudaMemsetAsync(ordered, 1, 64, stream), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(ordered, stream), cudaSuccess);
  std::atomic<int> freed{0};
  std::thread freer([&] {
    EXPECT_EQ(cudaFree(direct), cudaSuccess);
    freed = 1;
  });
  settle();
  EXPECT_EQ(freed, 0) << "free must wait for the device";
  gate.open();
  freer.join();
  cudaPointerAttributes a{};
  cudaPointerGetAttributes(&a, ordered);
  EXPECT_EQ(a.type, cudaMemoryTypeUnregistered);
}

ISOLATED(Errors, LastErrorIsTheThreadsOwnAndIsCleared, kDefault, 20) {
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  std::thread([] { EXPECT_EQ(cudaGetLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady");
  EXPECT_EQ(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(0x1234)), cudaErrorInvalidResourceHandle);
}

ISOLATED(Errors, HostFunctionsMustNotCallCuda, kDefault, 20) {
  static std::atomic<int> seen{-1};
  cudaStream_t stream = makeStream();
  cudaLaunchHostFunc(stream, [](void*) { seen = cudaDeviceSynchronize(); }, nullptr);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(seen, cudaErrorNotPermitted);
}

ISOLATED(Capture, IsNeverUnderWay, kDefault, 20) {
  cudaStream_t stream = makeStream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  unsigned long long id = 7;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  status = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamGetCaptureInfo(stream, &status, &id), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
}

// Stream one: work that ends only when stream two's work has run, then more of its own, issued before stream
// two's. With one hardware queue the second entry of stream one is at the head and holds up stream two for
// ever.
void dependOnALaterEntry(bool expect_blocked) {
  cudaStream_t one = makeStream(), two = makeStream();
  Gate gate;
  std::atomic<int> second{0}, other{0};
  launch(one, gate);
  launch(one, second);
  launch(two, other);
  if (expect_blocked) {
    std::this_thread::sleep_for(300ms);
    EXPECT_EQ(other, 0) << "one hardware queue let an entry overtake a blocked one";
    EXPECT_EQ(cudaStreamQuery(two), cudaErrorNotReady);
    gate.open();
  } else {
    EXPECT_TRUE(soon([&] { return other == 1; }));
    EXPECT_EQ(second, 0);
    gate.open();
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(second + other, 2);
}
ISOLATED(HardwareQueues, OnePerStreamByDefault, kDefault, 20) { dependOnALaterEntry(false); }
ISOLATED(HardwareQueues, OneBlocks, (halfwire::testing::Environment{{"HALFWIRE_HOST_HW_QUEUES", "1"}}), 20) {
  dependOnALaterEntry(true);
}
ISOLATED(HardwareQueues, TwoDoNotShare, (halfwire::testing::Environment{{"HALFWIRE_HOST_HW_QUEUES", "2"}}),
         20) {
  dependOnALaterEntry(false);
}
// An entry leaves its queue when it starts: running work of one stream does not hold up another stream.
ISOLATED(HardwareQueues, OneStillOverlaps, (halfwire::testing::Environment{{"HALFWIRE_HOST_HW_QUEUES", "1"}}),
         20) {
  cudaStream_t one = makeStream(), two = makeStream();
  Gate gate;
  std::atomic<int> other{0};
  launch(one, gate);
  launch(two, other);
  EXPECT_TRUE(soon([&] { return other == 1; }));
  gate.open();
}
// A wait for an event that is not reached blocks the queue too.
ISOLATED(HardwareQueues, WaitAtTheHeadBlocks,
         (halfwire::testing::Environment{{"HALFWIRE_HOST_HW_QUEUES", "1"}}), 20) {
  cudaStream_t one = makeStream(), two = makeStream(), three = makeStream();
  cudaEvent_t event = makeEvent();
  Gate gate;
  std::atomic<int> flag{0};
  launch(one, gate);
  EXPECT_TRUE(soon([&] { return gate.reached(); }));
  cudaEventRecord(event, one);
  cudaStreamWaitEvent(two, event, 0);
  launch(three, flag);
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(flag, 0);
  gate.open();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(flag, 1);
}

int64_t timeOfTwentyEntries() {
  cudaStream_t stream = makeStream();
  std::atomic<int> flag{0};
  const auto start = Clock::now();
  for (int i = 0; i < 20; ++i) launch(stream, flag);
  const auto enqueued = Clock::now() - start;
  EXPECT_LT(enqueued, 5s);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}
// Twenty uniform delays of 0 to 10 ms: at least 40 ms in all with this seed (100 ms expected).
ISOLATED(Delays, ComeBeforeEveryEntry,
         (halfwire::testing::Environment{{"HALFWIRE_HOST_DELAY_US", "10000"}, {"HALFWIRE_HOST_SEED", "3"}}),
         20) {
  EXPECT_GE(timeOfTwentyEntries(), 40);
}
// A missing edge between two streams shows: the consumer runs before the producer in some of the rounds.
ISOLATED(Delays, ExposeAMissingWait, (halfwire::testing::Environment{{"HALFWIRE_HOST_DELAY_US", "2000"}}),
         30) {
  int wrong_without = 0, wrong_with = 0;
  static int* value = nullptr;
  static std::atomic<int> copied{0};
  cudaMalloc(reinterpret_cast<void**>(&value), sizeof(int));
  cudaStream_t producer = makeStream(), consumer = makeStream();
  cudaEvent_t event = makeEvent();
  for (int round = 0; round < 40; ++round) {
    const bool edge = round % 2 == 1;
    cudaMemset(value, 0, sizeof(int));
    cudaDeviceSynchronize();
    cudaMemsetAsync(value, 1, sizeof(int), producer);
    if (edge) {
      cudaEventRecord(event, producer);
      cudaStreamWaitEvent(consumer, event, 0);
    }
    cudaLaunchHostFunc(consumer, [](void*) { copied = *static_cast<volatile int*>(value); }, nullptr);
    cudaDeviceSynchronize();
    if (copied != 0x01010101) ++(edge ? wrong_with : wrong_without);
  }
  EXPECT_GT(wrong_without, 0);
  EXPECT_EQ(wrong_with, 0);
}

ISOLATED(Options, ABadValueStopsTheFirstCall,
         (halfwire::testing::Environment{{"HALFWIRE_HOST_HW_QUEUES", "many"}}), 20) {
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, 4), cudaErrorInvalidValue);
  EXPECT_EQ(p, nullptr);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorInvalidValue)).find("HALFWIRE_HOST_HW_QUEUES"),
            std::string::npos)
      << cudaGetErrorString(cudaErrorInvalidValue);
}

void expectRefusal() {
  void* p = &p;
  EXPECT_EQ(cudaMalloc(&p, 4), cudaErrorSystemNotReady);
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreate(&stream), cudaErrorSystemNotReady);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorSystemNotReady)).find("real CUDA"), std::string::npos);
}
ISOLATED(Refusal, BesideARealCuda, kDefault, 20) {
  ASSERT_NE(dlopen(HALFWIRE_FAKE_CUDA, RTLD_NOW), nullptr) << dlerror();
  expectRefusal();
}
ISOLATED(Refusal, WhenARealCudaComesLater, kDefault, 20) {
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, 4), cudaSuccess);
  ASSERT_NE(dlopen(HALFWIRE_FAKE_CUDA, RTLD_NOW), nullptr) << dlerror();
  expectRefusal();
}

size_t threads() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++n;
  return n;
}
ISOLATED(Process, NoThreadBeforeTheFirstStream, kDefault, 20) {
  void* p = nullptr;
  int count = 0;
  std::thread([] {}).join();  // a sanitizer's own thread comes with the first
  const size_t before = threads();
  cudaGetDeviceCount(&count);
  cudaMalloc(&p, 100);
  cudaEvent_t event = makeEvent();
  cudaEventQuery(event);
  EXPECT_EQ(threads(), before);
  std::atomic<int> flag{0};
  cudaStream_t stream = makeStream();
  launch(stream, flag);
  cudaStreamSynchronize(stream);
  EXPECT_EQ(threads(), before + 1);
}

ISOLATED(Process, ForkedChildrenAreUnharmed, kDefault, 20) {
  cudaStream_t stream = makeStream();
  Gate gate;
  std::atomic<int> flag{0};
  launch(stream, gate);
  launch(stream, flag);
  EXPECT_TRUE(soon([&] { return gate.reached(); }));
  const pid_t quiet = fork();
  if (quiet == 0) std::exit(0);  // runs exit handlers
  const pid_t calling = fork();
  if (calling == 0) {
    void* p = nullptr;
    std::exit(cudaMalloc(&p, 4) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(quiet, &status, 0), quiet);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(waitpid(calling, &status, 0), calling);
  EXPECT_EQ(status, 0);
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(flag, 1);
}

TEST(Process, ExitDoesNotWaitForBlockedWork) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(15);
    auto* gate = new Gate;  // a condition variable with a waiter must not be destroyed
    cudaLaunchHostFunc(nullptr, Gate::wait, gate);
    soon([=] { return gate->reached(); });
    std::exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Exports, NothingButCudaNames) {
  const std::string command = std::string("nm -D --defined-only '") + HALFWIRE_HOSTRT_LIBRARY + "'";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  char line[512];
  size_t names = 0;
  while (std::fgets(line, sizeof(line), pipe) != nullptr) {
    const std::string text(line);
    const std::string name = text.substr(text.rfind(' ') + 1);
    const bool ours = name.rfind("cuda", 0) == 0 || name.rfind("halfwire_hostrt_", 0) == 0 ||
                      name.rfind("HALFWIRE_", 0) == 0;
    EXPECT_TRUE(ours) << name;
    ++names;
  }
  pclose(pipe);
  EXPECT_GE(names, 35u) << "nm printed nothing: is binutils installed?";
}

}  // namespace
