// The collectives, as blocking functions over a mesh. They run on a stream's worker thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hostccl/mesh.h"
#include "hostccl/reduction.h"

namespace halfwire::hostccl {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };

// One call, as NCCL takes it. `count` is what the NCCL function calls its count.
struct CollectiveCall {
  Collective kind = Collective::kAllReduce;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  Reduction reduction;
  int root = 0;
  uint64_t sequence = 0;  // number of the call on its communicator
};

// A Send or Recv.
struct PointToPoint {
  bool sends = false;
  void* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

// Both return early where the mesh fails; buffers are then unspecified.
void run(Mesh& mesh, const CollectiveCall& call);
void run(Mesh& mesh, const std::vector<PointToPoint>& calls);

// Payload bytes handed to links by this process so far.
uint64_t egressBytes();

}  // namespace halfwire::hostccl
