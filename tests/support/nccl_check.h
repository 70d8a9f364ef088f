// Calls that have to succeed in a rank of a test program.
#pragma once

#include <string>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "support/rank.h"

#define CHECK_NCCL(call)                                                                          \
  do {                                                                                            \
    const ncclResult_t nccl_result = (call);                                                      \
    if (nccl_result != ncclSuccess) {                                                             \
      RANK_FAIL(std::string(#call " returned ") + std::to_string(nccl_result) + " (" +            \
                ncclGetErrorString(nccl_result) + "), last error: " + ncclGetLastError(nullptr)); \
    }                                                                                             \
  } while (0)

#define CHECK_CUDA(call)                                                              \
  do {                                                                                \
    const cudaError_t cuda_error = (call);                                            \
    if (cuda_error != cudaSuccess) {                                                  \
      RANK_FAIL(std::string(#call " returned ") + std::to_string(cuda_error) + " (" + \
                cudaGetErrorString(cuda_error) + ")");                                \
    }                                                                                 \
  } while (0)

namespace halfwire::testing {

// The id that rank `root` makes, on every rank.
inline ncclUniqueId shareId(Rank& rank, int root = 0) {
  ncclUniqueId id = {};
  if (rank.rank() == root) CHECK_NCCL(ncclGetUniqueId(&id));
  const std::string bytes =
      rank.broadcast(rank.rank() == root ? std::string(id.internal, sizeof id.internal) : "", root);
  if (bytes.size() != sizeof id.internal) RANK_FAIL("no id came from the rank that makes it");
  bytes.copy(id.internal, sizeof id.internal);
  return id;
}

inline ncclComm_t makeWorld(Rank& rank) {
  const ncclUniqueId id = shareId(rank);
  ncclComm_t comm = nullptr;
  CHECK_NCCL(ncclCommInitRank(&comm, rank.ranks(), id, rank.rank()));
  return comm;
}

}  // namespace halfwire::testing
