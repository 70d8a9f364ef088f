#include "ring.h"

#include <algorithm>
#include <utility>

namespace halfwire::bench {
namespace {

Status cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

}  // namespace

Result<Ring> Ring::create(Device* device, const WireFormat& format, DataType type, uint32_t rank,
                          uint32_t ranks, uint64_t elements) {
  Ring ring;
  ring.device_ = device;
  ring.format_ = format;
  ring.type_ = type;
  ring.rank_ = rank;
  ring.ranks_ = ranks;
  const uint64_t packet = packetBytes(format, shardElements(format, elements, ranks));
  for (const auto& [pointer, packets] :
       {std::pair(&ring.own_, ranks), std::pair(&ring.result_, ranks), std::pair(&ring.moving_, 2u)}) {
    if (Status s =
            cuda(cudaMalloc(reinterpret_cast<void**>(pointer), packet * packets), "no memory for the ring");
        !s.ok())
      return s;
  }
  return ring;
}

Ring::Ring(Ring&& o) noexcept
    : device_(o.device_),
      format_(o.format_),
      type_(o.type_),
      rank_(o.rank_),
      ranks_(o.ranks_),
      own_(std::exchange(o.own_, nullptr)),
      result_(std::exchange(o.result_, nullptr)),
      moving_(std::exchange(o.moving_, nullptr)) {}

Ring::~Ring() {
  for (char* p : {own_, result_, moving_}) {
    if (p != nullptr) cudaFree(p);
  }
}

Status Ring::allReduce(const void* in, void* out, uint64_t elements, bool codec, ncclComm_t comm,
                       cudaStream_t stream) {
  const uint64_t shard = shardElements(format_, elements, ranks_);
  const uint64_t pitch = packetBytes(format_, shard);
  const auto length = [&](uint32_t i) { return std::min(shard, elements - std::min(elements, shard * i)); };
  const auto before = [&](uint32_t steps) { return (rank_ + 2 * ranks_ - steps) % ranks_; };
  const int next = static_cast<int>((rank_ + 1) % ranks_);
  const int previous = static_cast<int>(before(1));
  char* leaving = moving_;
  char* arriving = moving_ + pitch;

  const auto hop = [&](const char* from, uint32_t from_shard, char* to, uint32_t to_shard) -> Status {
    ncclResult_t result = pncclGroupStart();
    const uint64_t sent = packetBytes(format_, length(from_shard));
    const uint64_t received = packetBytes(format_, length(to_shard));
    if (result == ncclSuccess && sent > 0) result = pncclSend(from, sent, ncclUint8, next, comm, stream);
    if (result == ncclSuccess && received > 0)
      result = pncclRecv(to, received, ncclUint8, previous, comm, stream);
    const ncclResult_t end = pncclGroupEnd();
    if (result == ncclSuccess) result = end;
    return result == ncclSuccess ? Status() : Status(StatusCode::kInternal, pncclGetLastError(comm));
  };

  if (codec) {
    QuantizeJob quantize;
    quantize.format = format_;
    quantize.type = type_;
    quantize.segments = ranks_;
    quantize.in = in;
    quantize.in_pitch = shard;
    quantize.in_total = elements;
    quantize.segment_elements = shard;
    quantize.out = own_;
    quantize.out_pitch = pitch;
    if (Status s = device_->quantize(quantize, stream); !s.ok()) return s;
  }
  // Sums: after step s this rank holds the sum of s + 2 ranks for the shard s + 1 before its own.
  const char* source = own_ + rank_ * pitch;
  for (uint32_t step = 0; step + 1 < ranks_; ++step) {
    const uint32_t shard_in = before(step + 1);
    if (Status s = hop(source, before(step), arriving, shard_in); !s.ok()) return s;
    const bool last = step + 2 == ranks_;
    char* sum = last ? result_ + shard_in * pitch : leaving;
    if (codec) {
      ReduceJob reduce;
      reduce.format = format_;
      reduce.type = type_;
      reduce.packets = 2;
      reduce.in = arriving;
      reduce.in_pitch = pitch;
      reduce.own = own_ + shard_in * pitch;
      reduce.own_index = 1;
      reduce.elements = length(shard_in);
      reduce.out = sum;
      if (Status s = device_->reduce(reduce, stream); !s.ok()) return s;
    }
    source = sum;
  }
  // Gather: the final packets go round unchanged.
  for (uint32_t step = 0; step + 1 < ranks_; ++step) {
    const uint32_t shard_out = before(step + ranks_ - 1);
    const uint32_t shard_in = before(step);
    if (Status s = hop(result_ + shard_out * pitch, shard_out, result_ + shard_in * pitch, shard_in); !s.ok())
      return s;
  }
  if (!codec) return {};
  DequantizeJob dequantize;
  dequantize.format = format_;
  dequantize.type = type_;
  dequantize.segments = ranks_;
  dequantize.in = result_;
  dequantize.in_pitch = pitch;
  dequantize.segment_elements = shard;
  dequantize.out = out;
  dequantize.out_pitch = shard;
  dequantize.out_total = elements;
  return device_->dequantize(dequantize, stream);
}

}  // namespace halfwire::bench
