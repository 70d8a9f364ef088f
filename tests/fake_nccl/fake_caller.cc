// A library that needs NCCL, to be loaded by programs that do not, the way Python loads extensions.
#include "fake_nccl/fake_nccl.h"

// Makes a communicator and five calls of three kinds; returns how many of them reached the NCCL that this
// library is linked with, or a negative number where one failed.
extern "C" __attribute__((visibility("default"))) int makeFiveCalls() {
  float a[8] = {};
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  if (ncclGetUniqueId(&id) != ncclSuccess) return -1;
  if (ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess) return -2;
  for (int i = 0; i < 3; ++i) {
    if (ncclAllReduce(a, a, 8, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess) return -3;
  }
  if (ncclBcast(a, 8, ncclFloat32, 0, comm, nullptr) != ncclSuccess) return -4;
  if (ncclAllGather(a, a, 8, ncclFloat32, comm, nullptr) != ncclSuccess) return -5;
  if (ncclCommDestroy(comm) != ncclSuccess) return -6;
  return static_cast<int>(fake_nccl_calls("ncclAllReduce") + fake_nccl_calls("ncclBcast") +
                          fake_nccl_calls("ncclAllGather"));
}
