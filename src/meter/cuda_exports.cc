// The functions of the CUDA runtime that libhalfwire-meter.so defines in front of the real ones. Each version
// of the runtime has symbols of a version of its own, and so have these: a call reaches the runtime that its
// caller was linked against, also where a process holds two. Per-thread twins (_ptsz, _ptds) take a null
// stream for the thread's own.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <time.h>

#include <cstring>
#include <string>

#include "meter/meter.h"

namespace halfwire::meter {
namespace {

struct Dim3 {
  unsigned x, y, z;
};
struct LaunchConfig {  // the start of cudaLaunchConfig_t
  Dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

enum class Version { k11, k12, k13, kHost, kCount };
constexpr const char* kVersions[] = {"libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13",
                                     "HALFWIRE_HOSTRT_1"};
constexpr size_t kVersionCount = static_cast<size_t>(Version::kCount);

const void* objectOf(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

struct Search {
  const char* name;
  std::string path;
};

int lookAt(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(name, search->name, std::strlen(search->name)) != 0) return 0;
  search->path = info->dlpi_name;
  return 1;
}

// The real function of this version: by version in the program's global scope, then in the loaded runtime of
// that name, then any other definition. Never ours. Null where there is none.
void* findReal(Version version, const char* name) {
  const void* own = objectOf(reinterpret_cast<const void*>(&findReal));
  const char* node = kVersions[static_cast<size_t>(version)];
  void* found = dlvsym(RTLD_NEXT, name, node);
  if (found == nullptr && version != Version::kHost) {
    void* handle = dlopen(node, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    if (handle == nullptr) {
      Search search{node, {}};
      dl_iterate_phdr(lookAt, &search);
      if (!search.path.empty()) handle = dlopen(search.path.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
    }
    if (handle != nullptr) found = dlsym(handle, name);
  }
  if (found == nullptr) found = dlsym(RTLD_NEXT, name);
  return found != nullptr && objectOf(found) != own ? found : nullptr;
}

// Leaked: other threads may still be inside CUDA when the process exits.
Meter& meter() {
  static Meter* const meter = new Meter;
  return *meter;
}

// Whether to look at anything at all: false until the meter has started, and in a forked child.
std::atomic<bool> looking{false};

// One real function, found at its first call.
template <class Function>
class Real {
 public:
  constexpr Real(Version version, const char* name) : version_(version), name_(name) {}
  Function get() {
    Function f = found_.load(std::memory_order_relaxed);
    if (__builtin_expect(f != nullptr, 1)) return f;
    f = reinterpret_cast<Function>(findReal(version_, name_));
    found_.store(f, std::memory_order_relaxed);
    return f;
  }

 private:
  Version version_;
  const char* name_;
  std::atomic<Function> found_{nullptr};
};

template <class Function>
bool take(Version version, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(findReal(version, name));
  return *function != nullptr;
}

// What the meter itself calls, of one runtime; null where that lacks a function.
const CudaCalls* cudaCalls(Version version) {
  struct Found {
    CudaCalls calls;
    bool complete = false;
  };
  static Found* const found = [] {
    auto* all = new Found[kVersionCount];
    return all;
  }();
  static std::once_flag once[kVersionCount];
  const auto index = static_cast<size_t>(version);
  std::call_once(once[index], [&] {
    CudaCalls& c = found[index].calls;
    found[index].complete = take(version, "cudaEventCreateWithFlags", &c.eventCreate) &
                            take(version, "cudaEventRecord", &c.eventRecord) &
                            take(version, "cudaEventQuery", &c.eventQuery) &
                            take(version, "cudaEventElapsedTime", &c.eventElapsed) &
                            take(version, "cudaStreamIsCapturing", &c.isCapturing) &
                            take(version, "cudaThreadExchangeStreamCaptureMode", &c.exchangeCaptureMode) &
                            take(version, "cudaGetDevice", &c.getDevice) &
                            take(version, "cudaPeekAtLastError", &c.peekLastError) &
                            take(version, "cudaGetLastError", &c.getLastError);
    (void)take(version, "cudaStreamGetFlags", &c.streamFlags);
  });
  return found[index].complete ? &found[index].calls : nullptr;
}

// Kernels that this thread has launched on one stream and the tracker has not been told of. Initial-exec: the
// library is there from the start, and a launch must cost next to nothing.
struct Launches {
  cudaStream_t stream;
  bool per_thread;
  uint64_t count;
};
thread_local Launches launched __attribute__((tls_model("initial-exec"))) = {};

cudaStream_t named(cudaStream_t stream, bool per_thread) {
  return stream == nullptr && per_thread ? cudaStreamPerThread : stream;
}

void flushLaunches() {
  if (launched.count == 0) return;
  meter().launches(keyOf(named(launched.stream, launched.per_thread)), launched.count);
  launched.count = 0;
}

void noteLaunch(cudaStream_t stream, bool per_thread) {
  if (launched.stream != stream || launched.per_thread != per_thread) {
    flushLaunches();
    launched.stream = stream;
    launched.per_thread = per_thread;
  }
  ++launched.count;
}

bool watching() { return __builtin_expect(looking.load(std::memory_order_relaxed), 0); }

int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Times a call for which the host waits.
template <class Call>
cudaError_t hostWait(bool behind, Call&& call) {
  const int64_t begin = now();
  const cudaError_t error = call();
  meter().hostWaited(behind, now() - begin);
  return error;
}

constexpr cudaError_t kMissing = cudaErrorNotSupported;

// The hooks, by version and by what a null stream means.
using RecordFunction = cudaError_t (*)(cudaEvent_t, cudaStream_t);
using RecordFlagsFunction = cudaError_t (*)(cudaEvent_t, cudaStream_t, unsigned);
using WaitFunction = cudaError_t (*)(cudaStream_t, cudaEvent_t, unsigned);
using StreamFunction = cudaError_t (*)(cudaStream_t);
using EventFunction = cudaError_t (*)(cudaEvent_t);
using VoidFunction = cudaError_t (*)();
using CopyFunction = cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind);
using CopyAsyncFunction = cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
using SetAsyncFunction = cudaError_t (*)(void*, int, size_t, cudaStream_t);
using LaunchFunction = cudaError_t (*)(const void*, Dim3, Dim3, void**, size_t, cudaStream_t);
using LaunchExFunction = cudaError_t (*)(const LaunchConfig*, const void*, void**);
using GraphFunction = cudaError_t (*)(void*, cudaStream_t);
using HostFunction = cudaError_t (*)(cudaStream_t, cudaHostFn_t, void*);

void noteRecord(Version version, cudaEvent_t event, cudaStream_t stream, bool per_thread) {
  flushLaunches();
  const CudaCalls* cuda = cudaCalls(version);
  if (cuda != nullptr)
    meter().record(*cuda, reinterpret_cast<EventKey>(event), keyOf(named(stream, per_thread)));
}

cudaError_t record(Version v, RecordFunction real, bool per_thread, cudaEvent_t event, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (watching()) noteRecord(v, event, stream, per_thread);
  return real(event, stream);
}

cudaError_t recordFlags(Version v, RecordFlagsFunction real, bool per_thread, cudaEvent_t event,
                        cudaStream_t stream, unsigned flags) {
  if (real == nullptr) return kMissing;
  if (watching()) noteRecord(v, event, stream, per_thread);
  return real(event, stream, flags);
}

cudaError_t wait(Version v, WaitFunction real, bool per_thread, cudaStream_t stream, cudaEvent_t event,
                 unsigned flags) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real(stream, event, flags);
  flushLaunches();
  const CudaCalls* cuda = cudaCalls(v);
  if (cuda == nullptr) return real(stream, event, flags);
  const cudaStream_t waiting = named(stream, per_thread);
  Bracket* bracket = meter().beginWait(*cuda, reinterpret_cast<EventKey>(event), waiting, keyOf(waiting));
  const int64_t called = bracket != nullptr ? now() : 0;
  const cudaError_t error = real(stream, event, flags);
  if (bracket != nullptr) meter().close(bracket, called, error == cudaSuccess);
  return error;
}

cudaError_t synchronizeStream(StreamFunction real, bool per_thread, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real(stream);
  flushLaunches();
  return hostWait(meter().hostWaitsStream(keyOf(named(stream, per_thread))), [&] { return real(stream); });
}

cudaError_t synchronizeEvent(EventFunction real, cudaEvent_t event) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real(event);
  return hostWait(meter().hostWaitsEvent(reinterpret_cast<EventKey>(event)), [&] { return real(event); });
}

cudaError_t synchronizeDevice(VoidFunction real) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real();
  flushLaunches();
  return hostWait(meter().hostWaitsAll(), [&] { return real(); });
}

cudaError_t destroyStream(StreamFunction real, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (watching()) {
    if (launched.stream == stream) launched = {};
    meter().streamDestroyed(keyOf(stream));
  }
  return real(stream);
}

cudaError_t copy(CopyFunction real, bool per_thread, void* to, const void* from, size_t bytes,
                 cudaMemcpyKind kind) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real(to, from, bytes, kind);
  flushLaunches();
  const StreamKey key = keyOf(named(nullptr, per_thread));
  meter().copied(key);
  return hostWait(meter().hostWaitsStream(key), [&] { return real(to, from, bytes, kind); });
}

cudaError_t copyAsync(CopyAsyncFunction real, bool per_thread, void* to, const void* from, size_t bytes,
                      cudaMemcpyKind kind, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (!watching()) return real(to, from, bytes, kind, stream);
  flushLaunches();
  const StreamKey key = keyOf(named(stream, per_thread));
  meter().copied(key);
  if (kind != cudaMemcpyDeviceToHost) return real(to, from, bytes, kind, stream);
  // Into pageable memory it returns when the copy is done. Where it returns at once, as into pinned memory,
  // nothing was waited for, whatever it is behind.
  constexpr int64_t kReturnedAtOnce = 20'000;
  const int64_t begin = now();
  const cudaError_t error = real(to, from, bytes, kind, stream);
  const int64_t took = now() - begin;
  if (took > kReturnedAtOnce) meter().hostWaited(meter().hostWaitsStream(key), took);
  return error;
}

cudaError_t setAsync(SetAsyncFunction real, bool per_thread, void* to, int value, size_t bytes,
                     cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (watching()) {
    flushLaunches();
    meter().copied(keyOf(named(stream, per_thread)));
  }
  return real(to, value, bytes, stream);
}

cudaError_t launch(LaunchFunction real, bool per_thread, const void* function, Dim3 grid, Dim3 block,
                   void** args, size_t shared, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (watching()) noteLaunch(stream, per_thread);
  return real(function, grid, block, args, shared, stream);
}

cudaError_t launchEx(LaunchExFunction real, bool per_thread, const LaunchConfig* config, const void* function,
                     void** args) {
  if (real == nullptr) return kMissing;
  if (watching() && config != nullptr) noteLaunch(config->stream, per_thread);
  return real(config, function, args);
}

cudaError_t launchGraph(GraphFunction real, bool per_thread, void* graph, cudaStream_t stream) {
  if (real == nullptr) return kMissing;
  if (watching()) noteLaunch(stream, per_thread);
  return real(graph, stream);
}

// On the host engine these are the kernels; on a GPU they are not compute.
cudaError_t launchHost(Version v, HostFunction real, bool per_thread, cudaStream_t stream,
                       cudaHostFn_t function, void* argument) {
  if (real == nullptr) return kMissing;
  if (watching() && v == Version::kHost) noteLaunch(stream, per_thread);
  return real(stream, function, argument);
}

}  // namespace

// The table for libhalfwire.so.
namespace {

void stopInChild() {
  looking.store(false);
  meter().stop();
}

void start(RunLogFile* log, uint32_t every) {
  meter().start(log, every);
  if (!meter().on() || looking.load()) return;
  pthread_atfork(nullptr, nullptr, stopInChild);
  looking.store(true);
}

void begin(const MeterCall* calls, size_t count, MeterScope* scope) {
  flushLaunches();
  meter().beginCollectives(calls, count, scope);
}

void end(MeterScope* scope) { meter().endCollectives(scope); }

void step() { meter().step(); }

void range(const char* name) { meter().range(name); }

}  // namespace
}  // namespace halfwire::meter

extern "C" __attribute__((visibility("default"))) const halfwire::meter::MeterHooks* halfwire_meter_v1() {
  using namespace halfwire::meter;
  static constexpr MeterHooks kHooks = {1, sizeof(MeterHooks), start, begin, end, step, range};
  return &kHooks;
}

// One set of definitions for each version of the runtime. Newer runtimes than these are not touched: the
// report says that no event calls came.
#define HALFWIRE_CUDA(tag, node, at, per_thread, symbol, Function, params, ...)         \
  extern "C" __attribute__((visibility("default"))) cudaError_t symbol##_##tag params { \
    using namespace halfwire::meter;                                                    \
    static Real<Function> real(Version::tag, #symbol);                                  \
    [[maybe_unused]] constexpr Version v = Version::tag;                                \
    [[maybe_unused]] constexpr bool p = per_thread;                                     \
    return __VA_ARGS__;                                                                 \
  }                                                                                     \
  __asm__(".symver " #symbol "_" #tag ", " #symbol at node ", remove");

#define HALFWIRE_CUDA_STREAMS(tag, node, at, p, s, d)                                                 \
  HALFWIRE_CUDA(tag, node, at, p, cudaEventRecord##s, RecordFunction,                                 \
                (cudaEvent_t event, cudaStream_t stream), record(v, real.get(), p, event, stream))    \
  HALFWIRE_CUDA(tag, node, at, p, cudaEventRecordWithFlags##s, RecordFlagsFunction,                   \
                (cudaEvent_t event, cudaStream_t stream, unsigned flags),                             \
                recordFlags(v, real.get(), p, event, stream, flags))                                  \
  HALFWIRE_CUDA(tag, node, at, p, cudaStreamWaitEvent##s, WaitFunction,                               \
                (cudaStream_t stream, cudaEvent_t event, unsigned flags),                             \
                wait(v, real.get(), p, stream, event, flags))                                         \
  HALFWIRE_CUDA(tag, node, at, p, cudaStreamSynchronize##s, StreamFunction, (cudaStream_t stream),    \
                synchronizeStream(real.get(), p, stream))                                             \
  HALFWIRE_CUDA(tag, node, at, p, cudaMemcpy##d, CopyFunction,                                        \
                (void* to, const void* from, size_t bytes, cudaMemcpyKind kind),                      \
                copy(real.get(), p, to, from, bytes, kind))                                           \
  HALFWIRE_CUDA(tag, node, at, p, cudaMemcpyAsync##s, CopyAsyncFunction,                              \
                (void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream), \
                copyAsync(real.get(), p, to, from, bytes, kind, stream))                              \
  HALFWIRE_CUDA(tag, node, at, p, cudaMemsetAsync##s, SetAsyncFunction,                               \
                (void* to, int value, size_t bytes, cudaStream_t stream),                             \
                setAsync(real.get(), p, to, value, bytes, stream))                                    \
  HALFWIRE_CUDA(tag, node, at, p, cudaLaunchHostFunc##s, HostFunction,                                \
                (cudaStream_t stream, cudaHostFn_t function, void* argument),                         \
                launchHost(v, real.get(), p, stream, function, argument))

// What nvcc makes of <<<>>> calls cudaLaunchKernel up to CUDA 12, and __cudaLaunchKernel with a kernel's
// handle from 13 on.
#define HALFWIRE_CUDA_KERNELS(tag, node, at, p, s)                                                       \
  HALFWIRE_CUDA(                                                                                         \
      tag, node, at, p, cudaLaunchKernel##s, LaunchFunction,                                             \
      (const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, cudaStream_t stream),    \
      launch(real.get(), p, function, grid, block, args, shared, stream))                                \
  HALFWIRE_CUDA(                                                                                         \
      tag, node, at, p, __cudaLaunchKernel##s, LaunchFunction,                                           \
      (const void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, cudaStream_t stream),      \
      launch(real.get(), p, kernel, grid, block, args, shared, stream))                                  \
  HALFWIRE_CUDA(                                                                                         \
      tag, node, at, p, cudaLaunchCooperativeKernel##s, LaunchFunction,                                  \
      (const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, cudaStream_t stream),    \
      launch(real.get(), p, function, grid, block, args, shared, stream))                                \
  HALFWIRE_CUDA(tag, node, at, p, cudaLaunchKernelExC##s, LaunchExFunction,                              \
                (const LaunchConfig* config, const void* function, void** args),                         \
                launchEx(real.get(), p, config, function, args))                                         \
  HALFWIRE_CUDA(tag, node, at, p, cudaGraphLaunch##s, GraphFunction, (void* graph, cudaStream_t stream), \
                launchGraph(real.get(), p, graph, stream))

#define HALFWIRE_CUDA_PLAIN(tag, node, at)                                                      \
  HALFWIRE_CUDA(tag, node, at, false, cudaEventSynchronize, EventFunction, (cudaEvent_t event), \
                synchronizeEvent(real.get(), event))                                            \
  HALFWIRE_CUDA(tag, node, at, false, cudaDeviceSynchronize, VoidFunction, (),                  \
                synchronizeDevice(real.get()))                                                  \
  HALFWIRE_CUDA(tag, node, at, false, cudaStreamDestroy, StreamFunction, (cudaStream_t stream), \
                destroyStream(real.get(), stream))

#define HALFWIRE_CUDA_RUNTIME(tag, node, at)               \
  HALFWIRE_CUDA_STREAMS(tag, node, at, false, , )          \
  HALFWIRE_CUDA_STREAMS(tag, node, at, true, _ptsz, _ptds) \
  HALFWIRE_CUDA_KERNELS(tag, node, at, false, )            \
  HALFWIRE_CUDA_KERNELS(tag, node, at, true, _ptsz)        \
  HALFWIRE_CUDA_PLAIN(tag, node, at)

using halfwire::meter::Dim3;
using halfwire::meter::LaunchConfig;
HALFWIRE_CUDA_RUNTIME(k11, "libcudart.so.11.0", "@")
HALFWIRE_CUDA_RUNTIME(k12, "libcudart.so.12", "@")
HALFWIRE_CUDA_RUNTIME(k13, "libcudart.so.13", "@@")
HALFWIRE_CUDA_STREAMS(kHost, "HALFWIRE_HOSTRT_1", "@", false, , )
HALFWIRE_CUDA_PLAIN(kHost, "HALFWIRE_HOSTRT_1", "@")
