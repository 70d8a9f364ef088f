// What the test programs share: settings, buffers, and results that can be told exactly although the wire
// rounds.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "soak/values.h"
#include "support/launch.h"
#include "support/nccl_check.h"
#include "support/rank.h"

namespace halfwire::testing {

// Every call that can be compressed is.
inline Environment compressing() {
  return {{"HALFWIRE_MODE", "wire"},
          {"HALFWIRE_COMMS", "all"},
          {"HALFWIRE_MIN_BYTES", "0"},
          {"HALFWIRE_OPS", "allreduce,reducescatter,allgather,allgather-fp32"},
          {"HALFWIRE_MEETING_TIMEOUT", "10"}};
}

// Switched on, but no communicator is selected.
inline Environment passing() {
  Environment env = compressing();
  env["HALFWIRE_COMMS"] = "size:31";
  return env;
}

inline Environment with(Environment env, const Environment& more) {
  for (const auto& [name, value] : more) env[name] = value;
  return env;
}

inline LaunchOutcome launchWith(const std::string& program, int ranks, const Environment& env,
                                const std::vector<std::string>& args = {}, bool preload = true) {
  LaunchOptions options;
  options.ranks = ranks;
  options.env = env;
  options.args = args;
  options.preload = preload;
  options.timeout_s = 60;
  return launchRanks(program, options);
}

// Device memory for `count` elements of `type`, owned.
class Buffer {
 public:
  Buffer(ncclDataType_t type, size_t count) : type_(type), count_(count) {
    char bytes[8] = {};
    soak::store(type, bytes, 0, 0);
    element_bytes_ = type == ncclFloat32 ? 4 : 2;
    CHECK_CUDA(cudaMalloc(&data_, count * element_bytes_ + 1));
    fill(0);
  }
  ~Buffer() { (void)cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  void* at(size_t element) const { return static_cast<char*>(data_) + element * element_bytes_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * element_bytes_; }
  ncclDataType_t type() const { return type_; }

  // Only while no stream uses the buffer.
  void fill(double value) {
    for (size_t i = 0; i < count_; ++i) soak::store(type_, data_, i, value);
  }
  double get(size_t i) const { return soak::load(type_, data_, i); }
  // A buffer of equal numbers of few bits survives the wire exactly: it is its blocks' amax, and codes for
  // the amax decode to it within an fp32 ulp, which rounds away in 16 bits.
  void expect(double value, const char* what) const {
    for (size_t i = 0; i < count_; ++i) {
      if (get(i) == value) continue;
      RANK_FAIL(std::string(what) + ": element " + std::to_string(i) + " is " + std::to_string(get(i)) +
                ", not " + std::to_string(value));
    }
  }
  uint64_t hash() const { return soak::hashBytes(data_, bytes()); }

 private:
  ncclDataType_t type_;
  size_t count_;
  size_t element_bytes_ = 2;
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A communicator of some of the job's ranks, by an id that the first of them makes; null on the others.
inline ncclComm_t makeComm(Rank& rank, const std::vector<int>& members) {
  const ncclUniqueId id = shareId(rank, members.front());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] != rank.rank()) continue;
    ncclComm_t comm = nullptr;
    CHECK_NCCL(ncclCommInitRank(&comm, static_cast<int>(members.size()), id, static_cast<int>(i)));
    return comm;
  }
  return nullptr;
}

inline ncclResult_t allReduce(const Buffer& in, const Buffer& out, ncclComm_t comm, cudaStream_t stream,
                              ncclRedOp_t op = ncclSum) {
  return ncclAllReduce(in.data(), out.data(), in.count(), in.type(), op, comm, stream);
}

inline std::string hex(uint64_t value) {
  char text[20];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace halfwire::testing
