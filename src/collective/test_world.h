// For tests: all ranks of a communicator as one clique in one thread: a fake NCCL that moves data when a
// group ends, and a device that runs jobs at once.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "collective/compressor.h"

namespace halfwire {

class ImmediateDevice final : public Device {
 public:
  Status allocate(size_t bytes, void** out) override {
    if (full) return Status(StatusCode::kOutOfMemory, "full");
    *out = std::aligned_alloc(256, roundUp(bytes, 256));
    std::memset(*out, 0xa5, bytes);  // reads of what nobody wrote must show
    return {};
  }
  void release(void* pointer) override { std::free(pointer); }
  Status quantize(const QuantizeJob& job, StreamHandle) override {
    return reference::quantize(job), Status();
  }
  Status dequantize(const DequantizeJob& job, StreamHandle) override {
    return reference::dequantize(job), Status();
  }
  Status reduce(const ReduceJob& job, StreamHandle) override { return reference::reduce(job), Status(); }
  Status createEvent(EventHandle* out) override { return *out = &events, ++events, Status(); }
  void destroyEvent(EventHandle) override {}
  Status recordEvent(EventHandle, StreamHandle stream) override {
    return log.push_back({'r', stream}), Status();
  }
  Status waitEvent(StreamHandle stream, EventHandle) override {
    return log.push_back({'w', stream}), Status();
  }
  Status synchronizeEvent(EventHandle) override { return {}; }
  Status compare(const CompareJob& job, StreamHandle) override { return halfwire::compare(job), Status(); }
  Status copy(void* to, const void* from, size_t bytes, StreamHandle) override {
    return std::memcpy(to, from, bytes), Status();
  }
  Status zero(void* pointer, size_t bytes, StreamHandle) override {
    return std::memset(pointer, 0, bytes), Status();
  }
  Status allocateHost(size_t bytes, void** out) override { return *out = std::malloc(bytes), Status(); }
  void releaseHost(void* pointer) override { std::free(pointer); }
  Status createTimedEvent(EventHandle* out) override { return createEvent(out); }
  Status elapsed(EventHandle, EventHandle, float* ms, bool* done) override {
    return *ms = 1.5f, *done = !busy, Status();
  }
  Status createStream(StreamHandle* out) override { return *out = this, Status(); }
  Status finishStream(StreamHandle) override { return {}; }
  bool connectsLazily() const override { return true; }
  bool overlapsPasses() const override { return false; }
  Status perturb(const PerturbJob& job, StreamHandle) override { return halfwire::perturb(job), Status(); }
  uint64_t nvlinkDomain() const override { return 0; }
  Status captureOf(StreamHandle, uint64_t* out) override { return *out = capture, Status(); }
  Status recordEventOutside(EventHandle, StreamHandle stream) override {
    return log.push_back({'R', stream}), Status();
  }
  Status waitEventOutside(StreamHandle stream, EventHandle) override {
    return log.push_back({'W', stream}), Status();
  }
  const char* codecName() const override { return "test"; }
  size_t freeBytes() override { return 0; }
  int events = 0;
  bool full = false;
  bool busy = false;  // no event has happened yet
  uint64_t capture = 0;
  std::vector<std::pair<char, StreamHandle>> log;
};

// The wire between the ranks of one process.
struct Wire {
  struct Message {
    const void* from = nullptr;
    void* to = nullptr;
    size_t bytes = 0;
  };
  struct Gather {
    const void* send;
    char* recv;
    size_t bytes;
  };
  struct Reduce {
    const void* send;
    void* recv;
    size_t count;
    ncclRedOp_t op;
    bool scatter;
  };
  std::map<int, std::vector<Reduce>> reduces;                        // by rank
  std::map<std::pair<int, int>, std::vector<Message>> sends, recvs;  // (from, to)
  std::map<int, std::vector<Gather>> gathers;                        // by rank
  std::map<int, std::vector<std::pair<int, Message>>> broadcasts;    // by rank, with their roots
  int depth = 0;
  int groups = 0;
  uint64_t bytes = 0;
  bool broken = false;
};
inline Wire wire;

inline int rankOf(ncclComm_t comm) { return static_cast<int>(reinterpret_cast<intptr_t>(comm)) - 1; }
inline ncclComm_t commOf(uint32_t rank) {
  return reinterpret_cast<ncclComm_t>(static_cast<intptr_t>(rank) + 1);
}

// Carries out the reductions of fp32 that the group holds.
inline void reduceExactly() {
  if (wire.reduces.empty()) return;
  const auto ranks = wire.reduces.size();
  for (size_t i = 0; i < wire.reduces.begin()->second.size(); ++i) {
    const Wire::Reduce first = wire.reduces.begin()->second[i];
    std::vector<float> sum(first.count * (first.scatter ? ranks : 1));
    for (const auto& [rank, list] : wire.reduces) {
      for (size_t k = 0; k < sum.size(); ++k) sum[k] += static_cast<const float*>(list[i].send)[k];
    }
    if (first.op == ncclAvg) {
      for (float& x : sum) x /= static_cast<float>(ranks);
    }
    for (const auto& [rank, list] : wire.reduces) {
      const float* from = sum.data() + (first.scatter ? static_cast<size_t>(rank) * first.count : 0);
      std::memcpy(list[i].recv, from, first.count * sizeof(float));
    }
  }
  wire.reduces.clear();
}

inline NcclApi fakeApi() {
  NcclApi api;
  api.ncclGroupStart = [] { return ++wire.depth, ncclSuccess; };
  api.ncclSend = [](const void* p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t) {
    wire.sends[{rankOf(c), peer}].push_back({p, nullptr, n});
    wire.bytes += n;
    return ncclSuccess;
  };
  api.ncclRecv = [](void* p, size_t n, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t) {
    wire.recvs[{peer, rankOf(c)}].push_back({nullptr, p, n});
    return ncclSuccess;
  };
  api.ncclAllGather = [](const void* s, void* r, size_t n, ncclDataType_t, ncclComm_t c, cudaStream_t) {
    wire.gathers[rankOf(c)].push_back({s, static_cast<char*>(r), n});
    return ncclSuccess;
  };
  api.ncclBroadcast = [](const void* s, void* r, size_t n, ncclDataType_t, int root, ncclComm_t c,
                         cudaStream_t) {
    wire.broadcasts[rankOf(c)].push_back({root, {s, r, n}});
    wire.bytes += n;
    return ncclSuccess;
  };
  api.ncclAllReduce = [](const void* s, void* r, size_t n, ncclDataType_t, ncclRedOp_t op, ncclComm_t c,
                         cudaStream_t) {
    wire.reduces[rankOf(c)].push_back({s, r, n, op, false});
    return ncclSuccess;
  };
  api.ncclReduceScatter = [](const void* s, void* r, size_t n, ncclDataType_t, ncclRedOp_t op, ncclComm_t c,
                             cudaStream_t) {
    wire.reduces[rankOf(c)].push_back({s, r, n, op, true});
    return ncclSuccess;
  };
  api.ncclGroupEnd = [] {
    if (--wire.depth > 0) return ncclSuccess;
    ++wire.groups;
    reduceExactly();
    if (wire.sends.size() != wire.recvs.size()) wire.broken = true;
    for (auto& [ends, messages] : wire.sends) {
      auto& to = wire.recvs[ends];
      if (to.size() != messages.size()) wire.broken = true;
      for (size_t i = 0; i < messages.size() && i < to.size(); ++i) {
        if (to[i].bytes != messages[i].bytes || to[i].bytes == 0) wire.broken = true;
        std::memcpy(to[i].to, messages[i].from, std::min(to[i].bytes, messages[i].bytes));
      }
    }
    for (auto& [receiver, list] : wire.gathers) {
      for (size_t i = 0; i < list.size(); ++i) {
        for (auto& [sender, other] : wire.gathers) {
          if (other.size() != list.size() || other[i].bytes != list[i].bytes) {
            wire.broken = true;
            continue;
          }
          char* to = list[i].recv + static_cast<size_t>(sender) * list[i].bytes;
          if (to != other[i].send) std::memmove(to, other[i].send, list[i].bytes);
          if (sender != receiver) wire.bytes += list[i].bytes;
        }
      }
    }
    for (auto& [rank, list] : wire.broadcasts) {
      for (size_t i = 0; i < list.size(); ++i) {
        const auto& [root, source] = wire.broadcasts[list[i].first][i];
        if (root != list[i].first || source.bytes != list[i].second.bytes) wire.broken = true;
        if (list[i].second.to != source.from) std::memcpy(list[i].second.to, source.from, source.bytes);
      }
    }
    wire.broadcasts.clear();
    wire.sends.clear();
    wire.recvs.clear();
    wire.gathers.clear();
    return ncclSuccess;
  };
  return api;
}

struct OpenGate final : CallGate {
  bool enter() override { return ++entered, !closed; }
  void leave() override {}
  int entered = 0;
  bool closed = false;
};

struct World {
  explicit World(uint32_t ranks, WireFormat format, uint64_t chunk_bytes, bool noise = false,
                 bool stochastic = false, bool overlap = false)
      : api(fakeApi()) {
    wire = {};
    for (uint32_t r = 0; r < ranks; ++r) {
      auto made = Compressor::create(
          &api, &device, {commOf(r), r, ranks, format, chunk_bytes, overlap, noise, stochastic, 9, 0});
      EXPECT_TRUE(made.ok());
      members.push_back(std::move(made).value());
    }
  }
  std::vector<CompressedTurn> run(const std::vector<std::vector<CompressedCall>>& calls) {
    std::vector<CompressedTurn> turns;
    for (size_t r = 0; r < members.size(); ++r) {
      CompressedTurn turn;
      turn.compressor = members[r].get();
      turn.calls = calls[r];
      turns.push_back(std::move(turn));
    }
    std::string error;
    EXPECT_EQ(runCompressed(turns, gate, &error), ncclSuccess) << error;
    EXPECT_FALSE(wire.broken);
    return turns;
  }
  NcclApi api;
  ImmediateDevice device;
  OpenGate gate;
  std::vector<std::unique_ptr<Compressor>> members;
};

inline std::vector<float> randomFloats(uint64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(count);
  for (float& x : v) x = normal(generator);
  return v;
}

}  // namespace halfwire
