// A rank of a small job that says by NVTX ranges where its steps begin, in the way that its argument names.
// Its collectives never repeat, so that nothing else says it. Prints what the calls return, and who listens.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cwchar>
#include <random>
#include <string>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "launch/rendezvous.h"

extern "C" void halfwire_step(void) __attribute__((weak));

namespace {

nvtxEventAttributes_t event(nvtxMessageType_t type) {
  nvtxEventAttributes_t e{};
  e.version = NVTX_VERSION;
  e.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  e.messageType = type;
  return e;
}

// What the call that began the range returned.
long begin(const std::string& way, nvtxDomainHandle_t domain, int step) {
  const std::string name = "iteration " + std::to_string(step);
  if (way == "wide") return nvtxRangePushW(std::wstring(name.begin(), name.end()).c_str());
  if (way == "start")
    return static_cast<long>(nvtxRangeStartA(("train_step_" + std::to_string(step)).c_str()));
  if (way == "event") {
    nvtxEventAttributes_t e = event(NVTX_MESSAGE_TYPE_ASCII);
    const std::string profiler = "ProfilerStep#" + std::to_string(step);
    e.message.ascii = profiler.c_str();
    return nvtxRangePushEx(&e);
  }
  if (way == "registered") {
    nvtxEventAttributes_t e = event(NVTX_MESSAGE_TYPE_REGISTERED);
    e.message.registered = nvtxDomainRegisterStringA(domain, "step");
    return nvtxDomainRangePushEx(domain, &e);
  }
  if (way == "epoch") return nvtxRangePushA(("epoch" + std::to_string(step)).c_str());
  const long returned = nvtxRangePushA(name.c_str());
  if (way == "marked" && step % 2 == 0 && halfwire_step != nullptr) halfwire_step();
  // What stands inside a step is none, whatever it is called.
  if (way == "inner") nvtxRangePushA("step");
  return returned;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string way = argc > 1 ? argv[1] : "push";
  const auto info = halfwire::readRankInfo();
  if (!info.ok()) return 10;
  const halfwire::RankInfo& me = info.value();
  ncclUniqueId id{};
  if (me.rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) return 11;
  if (!halfwire::shareFromRankZero(me, std::span(id.internal, sizeof id.internal)).ok()) return 12;
  ncclComm_t comm = nullptr;
  if (ncclCommInitRank(&comm, me.ranks, id, me.rank) != ncclSuccess) return 13;
  void* data = nullptr;
  cudaStream_t stream = nullptr;
  if (cudaMalloc(&data, 1 << 16) != cudaSuccess || cudaStreamCreate(&stream) != cudaSuccess) return 14;
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("trainer");
  std::mt19937 random(7);
  long returned = 0;
  for (int step = 0; step < 40; ++step) {
    returned = begin(way, domain, step);
    for (int call = 0; call < 3; ++call) {
      if (ncclAllReduce(data, data, 1 + random() % 10000, ncclFloat32, ncclSum, comm, stream) != ncclSuccess)
        return 15;
    }
    if (cudaStreamSynchronize(stream) != cudaSuccess) return 16;
    nvtxRangePop();
    if (way == "inner") nvtxRangePop();
    // A name that begins like a step's.
    nvtxRangePushA("stepping");
    nvtxRangePop();
  }
  const char* listens = std::getenv("NVTX_INJECTION64_PATH");
  if (me.rank == 0)
    std::printf("returned %ld, domain %d, listens %s\n", returned, domain != nullptr,
                listens != nullptr ? listens : "-");
  return ncclCommDestroy(comm) == ncclSuccess ? 0 : 17;
}
