// A rank of a small job for run_test: two AllReduces of 8 MiB and a small one, then the end that its argument
// names: "return", "_exit" (as os._exit in Python), "kill" (SIGKILL) or "kill-rank-1" (only that rank; the
// others go on).
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "launch/rendezvous.h"

int main(int argc, char** argv) {
  const std::string end = argc > 1 ? argv[1] : "return";
  const auto info = halfwire::readRankInfo();
  if (!info.ok()) return 10;
  const halfwire::RankInfo& me = info.value();
  ncclUniqueId id{};
  if (me.rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) return 11;
  if (!halfwire::shareFromRankZero(me, std::span(id.internal, sizeof id.internal)).ok()) return 12;
  ncclComm_t comm = nullptr;
  if (ncclCommInitRank(&comm, me.ranks, id, me.rank) != ncclSuccess) {
    std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
    return 13;
  }
  constexpr size_t kCount = 4 << 20;
  void* data = nullptr;
  cudaStream_t stream = nullptr;
  if (cudaMalloc(&data, kCount * 2) != cudaSuccess || cudaStreamCreate(&stream) != cudaSuccess) return 14;
  std::memset(data, 0, kCount * 2);
  for (const size_t count : {kCount, kCount, size_t{64}}) {
    if (ncclAllReduce(data, data, count, ncclBfloat16, ncclSum, comm, stream) != ncclSuccess) return 15;
  }
  if (cudaStreamSynchronize(stream) != cudaSuccess) return 16;
  if (end == "kill" || (end == "kill-rank-1" && me.rank == 1)) kill(getpid(), SIGKILL);
  if (end == "kill-rank-1") sleep(60);
  if (end == "_exit") _exit(5);
  return ncclCommDestroy(comm) == ncclSuccess ? 0 : 17;
}
