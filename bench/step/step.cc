// One rank of `halfwire bench step` on the host engine: training steps in miniature. A pass of stages
// computes, gathers parameters before and reduces gradients behind a stage, each as it comes beside the
// compute, or merged at the ends of the passes. Kernels note when they began and ended, so that what the
// compute stream waited for is known by construction. Usage: halfwire-bench-step CONFIG.json RESULT-PREFIX;
// rank k writes PREFIX.k.json.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "launch/rendezvous.h"

extern "C" void halfwire_step(void) __attribute__((weak));

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void die(const std::string& what) {
  fmt::print(stderr, "halfwire-bench-step: {}\n", what);
  std::exit(1);
}
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) die(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}
void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess)
    die(fmt::format("{}: {} ({})", what, ncclGetErrorString(result), ncclGetLastError(nullptr)));
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

struct Stage {
  int64_t compute_us = 0;
  size_t gather_bytes = 0;  // of parameters, before it
  size_t reduce_bytes = 0;  // of gradients, behind it
};

struct Config {
  std::vector<Stage> forward, backward;
  int64_t optimizer_us = 0;
  bool scatter = false;  // ReduceScatter rather than AllReduce
  bool merged = false;
  int steps = 0;
};

std::vector<Stage> stages(const nlohmann::json& json) {
  std::vector<Stage> out;
  for (const auto& s : json)
    out.push_back({s.at(0).get<int64_t>(), s.at(1).get<size_t>(), s.at(2).get<size_t>()});
  return out;
}

Config readConfig(const char* path) {
  std::ifstream in(path);
  const auto json = nlohmann::json::parse(in, nullptr, false);
  if (!json.is_object()) die(fmt::format("{} is not readable", path));
  Config c;
  c.forward = stages(json.at("forward"));
  c.backward = stages(json.at("backward"));
  c.optimizer_us = json.at("optimizer_us").get<int64_t>();
  c.scatter = json.at("scatter").get<bool>();
  c.merged = json.at("merged").get<bool>();
  c.steps = json.at("steps").get<int>();
  return c;
}

// Takes its time without a processor, as a device's kernel does.
struct Kernel {
  int64_t us = 0;
  int64_t begin = 0, end = 0;
  int64_t waits_since = 0;  // host time of the wait before it, 0 for none
  static void run(void* argument) {
    auto* k = static_cast<Kernel*>(argument);
    k->begin = now();
    std::this_thread::sleep_until(Clock::time_point(std::chrono::nanoseconds(k->begin + k->us * 1000)));
    k->end = now();
  }
};

class Step {
 public:
  Step(const Config& config, int ranks, ncclComm_t comm) : config_(config), ranks_(ranks), comm_(comm) {
    check(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking), "no stream");
    check(cudaStreamCreateWithFlags(&communication_, cudaStreamNonBlocking), "no stream");
    size_t most = 1024;
    for (const auto* pass : {&config.forward, &config.backward}) {
      size_t sum = 0;
      for (const Stage& s : *pass) sum += std::max(s.gather_bytes, s.reduce_bytes);
      most = std::max(most, sum);
    }
    check(cudaMalloc(&from_, most), "no memory");
    check(cudaMalloc(&to_, most), "no memory");
    check(cudaMemset(from_, 0, most), "no memory");
  }

  // What the compute stream waited for in this step, in nanoseconds.
  int64_t run() {
    kernels_.clear();
    waited_ = 0;
    pass(config_.forward);
    pass(config_.backward);
    kernel(config_.optimizer_us);
    check(cudaStreamSynchronize(compute_), "the stream failed");
    int64_t exposed = 0;
    for (size_t i = 0; i < kernels_.size(); ++i) {
      const Kernel& k = kernels_[i];
      if (k.waits_since == 0) continue;
      const int64_t ready = std::max(k.waits_since, i == 0 ? 0 : kernels_[i - 1].end);
      exposed += std::max<int64_t>(k.begin - ready, 0);
    }
    return exposed;
  }

 private:
  void pass(const std::vector<Stage>& stages) {
    size_t gathered = 0, reduced = 0;
    for (const Stage& s : stages) {
      gathered += s.gather_bytes;
      reduced += s.reduce_bytes;
    }
    if (config_.merged) {
      if (gathered > 0) wait(gather(gathered));
      for (const Stage& s : stages) kernel(s.compute_us);
      if (reduced > 0) wait(reduce(reduced));
      return;
    }
    // The next stage's parameters come while this one computes.
    std::deque<cudaEvent_t> ahead;
    size_t next = 0;
    for (size_t i = 0; i < stages.size(); ++i) {
      for (; next < stages.size() && next <= i + 1; ++next)
        ahead.push_back(stages[next].gather_bytes > 0 ? gather(stages[next].gather_bytes) : nullptr);
      if (ahead.front() != nullptr) wait(ahead.front());
      ahead.pop_front();
      kernel(stages[i].compute_us);
      if (stages[i].reduce_bytes > 0) last_ = reduce(stages[i].reduce_bytes);
    }
    if (last_ != nullptr) wait(std::exchange(last_, nullptr));
  }

  void kernel(int64_t us) {
    Kernel& k = kernels_.emplace_back();
    k.us = us;
    k.waits_since = std::exchange(waited_, 0);
    check(cudaLaunchHostFunc(compute_, Kernel::run, &k), "the stream failed");
  }

  cudaEvent_t record(cudaStream_t stream) {
    if (next_event_ == events_.size()) {
      cudaEvent_t made = nullptr;
      check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "no event");
      events_.push_back(made);
    }
    const cudaEvent_t event = events_[next_event_++];
    if (next_event_ == 64) next_event_ = 0;
    check(cudaEventRecord(event, stream), "the stream failed");
    return event;
  }

  void wait(cudaEvent_t event) {
    waited_ = now();
    check(cudaStreamWaitEvent(compute_, event, 0), "the stream failed");
  }

  cudaEvent_t gather(size_t bytes) {
    check(ncclAllGather(from_, to_, bytes / 2 / static_cast<size_t>(ranks_), ncclBfloat16, comm_,
                        communication_),
          "the collective failed");
    return record(communication_);
  }

  cudaEvent_t reduce(size_t bytes) {
    check(cudaStreamWaitEvent(communication_, record(compute_), 0), "the stream failed");
    const size_t count = bytes / 2;
    check(config_.scatter ? ncclReduceScatter(from_, to_, count / static_cast<size_t>(ranks_), ncclBfloat16,
                                              ncclSum, comm_, communication_)
                          : ncclAllReduce(from_, to_, count, ncclBfloat16, ncclSum, comm_, communication_),
          "the collective failed");
    return record(communication_);
  }

  const Config& config_;
  int ranks_;
  ncclComm_t comm_;
  cudaStream_t compute_ = nullptr, communication_ = nullptr;
  void* from_ = nullptr;
  void* to_ = nullptr;
  std::deque<Kernel> kernels_;
  std::vector<cudaEvent_t> events_;
  size_t next_event_ = 0;
  cudaEvent_t last_ = nullptr;
  int64_t waited_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3)
    die("usage: halfwire-bench-step CONFIG.json RESULT-PREFIX (`halfwire bench step` starts it)");
  const Config config = readConfig(argv[1]);
  const auto info = halfwire::readRankInfo();
  if (!info.ok()) die(info.status().message());
  ncclUniqueId id{};
  if (info.value().rank == 0) check(ncclGetUniqueId(&id), "cannot make an id");
  if (const auto shared =
          halfwire::shareFromRankZero(info.value(), std::span(id.internal, sizeof id.internal));
      !shared.ok()) {
    die(shared.message());
  }
  ncclComm_t comm = nullptr;
  check(ncclCommInitRank(&comm, info.value().ranks, id, info.value().rank), "cannot connect the ranks");
  Step step(config, info.value().ranks, comm);
  std::vector<double> step_ms, exposed_ms;
  for (int i = 0; i <= config.steps; ++i) {
    const int64_t begin = now();
    if (halfwire_step != nullptr) halfwire_step();
    if (i == config.steps) break;  // only ends the last step
    exposed_ms.push_back(static_cast<double>(step.run()) * 1e-6);
    step_ms.push_back(static_cast<double>(now() - begin) * 1e-6);
  }
  const std::string path = fmt::format("{}.{}.json", argv[2], info.value().rank);
  std::ofstream out(path);
  out << nlohmann::json{{"rank", info.value().rank}, {"step_ms", step_ms}, {"exposed_ms", exposed_ms}}.dump();
  out.close();
  if (!out) die(fmt::format("cannot write {}", path));
  check(ncclCommDestroy(comm), "cannot close");
  return 0;
}
