// A block-scaled ring AllReduce, to compare the all-to-all decomposition with: every hop adds a rank's own
// packet to the packet that came round and requantizes the sum. Each element is rounded once a hop, W times
// in all.
#pragma once

#include <cstdint>

#include "abi/cuda_runtime.h"
#include "abi/nccl.h"
#include "base/status.h"
#include "device/device.h"

namespace halfwire::bench {

class Ring {
 public:
  // Buffers for messages of up to `elements` elements. `device` runs the codec and must outlive the ring.
  static Result<Ring> create(Device* device, const WireFormat& format, DataType type, uint32_t rank,
                             uint32_t ranks, uint64_t elements);
  Ring(Ring&& other) noexcept;
  Ring& operator=(Ring&&) = delete;
  ~Ring();

  // Sums `in` over the ranks into `out`. With `codec` false the same messages move and nothing is computed.
  Status allReduce(const void* in, void* out, uint64_t elements, bool codec, ncclComm_t comm,
                   cudaStream_t stream);

 private:
  Ring() = default;

  Device* device_ = nullptr;
  WireFormat format_;
  DataType type_ = DataType::kBf16;
  uint32_t rank_ = 0;
  uint32_t ranks_ = 1;
  char* own_ = nullptr;     // my packet of every shard
  char* result_ = nullptr;  // the final packet of every shard
  char* moving_ = nullptr;  // two packets: the one that leaves and the one that arrives
};

}  // namespace halfwire::bench
