#include "hostrt/process.h"

#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace halfwire::hostrt {
namespace {

// All of this lives until the process ends: workers may outlive the program's static objects.
struct State {
  std::once_flag once;
  Process* process = nullptr;
  std::string bad_option;
  std::atomic<bool> cuda_found{false};
  std::atomic<bool> forked{false};
  std::atomic<unsigned long long> objects_seen{0};
};

State& state() {
  static State* const state = new State;
  return *state;
}

struct Search {
  unsigned long long seen;
  unsigned long long loads = 0;
  bool found = false;
};

int lookAt(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  search->loads = info->dlpi_adds;
  if (search->loads == search->seen) return 1;  // nothing was loaded since the last look
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(name, "libcuda.so", 10) == 0 || std::strncmp(name, "libcudart.so", 12) == 0)
    search->found = true;
  return search->found ? 1 : 0;
}

bool cudaIsLoaded() {
  State& s = state();
  if (s.cuda_found) return true;
  Search search{s.objects_seen.load()};
  dl_iterate_phdr(lookAt, &search);
  s.objects_seen = search.loads;
  if (search.found) s.cuda_found = true;
  return search.found;
}

void afterForkInChild() {
  State& s = state();
  if (s.process == nullptr) return;
  s.process->runtime.resetLockInChild();
  s.process->memory.resetLockInChild();
  if (s.process->runtime.hasThreads()) s.forked = true;
}

void stopAtExit() {
  State& s = state();
  if (s.process == nullptr || s.forked) return;
  s.process->runtime.stop();
  s.process->runtime.writeTrace();
}

void start() {
  State& s = state();
  Result<Options> options = readOptions();
  if (!options.ok()) {
    s.bad_option = "the host runtime cannot start: " + options.status().message();
    return;
  }
  s.process = new Process{Runtime(options.value()), {}};
  pthread_atfork(nullptr, nullptr, afterForkInChild);
  std::atexit(stopAtExit);
}

}  // namespace

Process* process(cudaError_t* error, bool allocating) {
  State& s = state();
  std::call_once(s.once, [] {
    if (!cudaIsLoaded()) start();
  });
  if (s.cuda_found || (allocating && cudaIsLoaded())) {
    *error = cudaErrorSystemNotReady;
  } else if (!s.bad_option.empty()) {
    *error = cudaErrorInvalidValue;
  } else if (s.forked) {
    *error = cudaErrorInitializationError;
  } else if (insideHostFunction()) {
    *error = cudaErrorNotPermitted;
  } else {
    *error = cudaSuccess;
    return s.process;
  }
  return nullptr;
}

const char* refusal(cudaError_t error) {
  const State& s = state();
  if (error == cudaErrorSystemNotReady) {
    return "the host runtime refuses to run because a real CUDA (libcuda or libcudart) is loaded in this "
           "process: "
           "link the program with either of them, not both";
  }
  if (error == cudaErrorInvalidValue && !s.bad_option.empty()) return s.bad_option.c_str();
  return nullptr;
}

}  // namespace halfwire::hostrt
