// What one NCCL call costs the caller: a million ncclAllReduce calls of one element against the fake NCCL,
// timed in batches. Prints the median of nanoseconds per call over the batches. Usage: passthrough_cost
// [calls]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fake_nccl/fake_nccl.h"

int main(int argc, char** argv) {
  // A batch is far longer than reading the clock and far shorter than a time slice.
  constexpr int kBatch = 50;
  const int batches = (argc > 1 ? atoi(argv[1]) : 1000000) / kBatch;
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  float element = 0;
  if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess) return 1;
  std::vector<double> ns(batches);
  for (double& batch : ns) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kBatch; ++i) {
      if (ncclAllReduce(&element, &element, 1, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess) return 1;
    }
    batch =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kBatch;
  }
  std::nth_element(ns.begin(), ns.begin() + batches / 2, ns.end());
  printf("%.2f\n", ns[batches / 2]);
  if (fake_nccl_calls("ncclAllReduce") != static_cast<uint64_t>(batches) * kBatch) return 3;
  return ncclCommDestroy(comm) == ncclSuccess ? 0 : 1;
}
