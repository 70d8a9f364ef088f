#include "hostccl/collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "abi/nccl_types.h"

namespace halfwire::hostccl {
namespace {

std::atomic<uint64_t> egress{0};

// Slots: point-to-point messages between two ranks share one and match in order; each collective call has
// four.
constexpr uint64_t kPointToPointSlot = Mesh::kFirstSlot;
uint64_t slot(const CollectiveCall& call, uint64_t phase) {
  return (uint64_t{1} << 32) + call.sequence * 4 + phase;
}

struct Piece {
  int peer;
  char* data;
  size_t bytes;
};

// All sends and receives at once. False: the mesh failed.
bool exchange(Mesh& mesh, uint64_t slot, const std::vector<Piece>& sends,
              const std::vector<Piece>& receives) {
  std::vector<std::unique_ptr<Message>> messages;
  messages.reserve(sends.size() + receives.size());
  for (const Piece& p : receives) {
    if (p.bytes > 0) messages.push_back(mesh.receive(p.peer, slot, p.data, p.bytes));
    if (!messages.empty() && !messages.back()) return false;
  }
  for (const Piece& p : sends) {
    if (p.bytes == 0) continue;
    messages.push_back(mesh.send(p.peer, slot, p.data, p.bytes));
    if (!messages.back()) return false;
    egress += p.bytes;
  }
  for (const auto& message : messages) {
    if (!message->wait()) return false;
  }
  return true;
}

// Peers in an order in which not everybody turns to the same one first.
std::vector<int> peersOf(const Mesh& mesh) {
  std::vector<int> peers;
  for (int step = 1; step < mesh.size(); ++step) peers.push_back((mesh.rank() + step) % mesh.size());
  return peers;
}

// A buffer cut into one part per rank; parts may be empty.
struct Parts {
  size_t count, part;
  size_t begin(int rank) const { return std::min(count, part * static_cast<size_t>(rank)); }
  size_t size(int rank) const { return begin(rank + 1) - begin(rank); }
};

void copy(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

// Every rank's factor, which PreMulSum's ranks may choose differently.
bool shareFactors(Mesh& mesh, const CollectiveCall& call, std::vector<uint64_t>* factors) {
  if (call.reduction.op != Operator::kPreMulSum) return true;
  uint64_t mine = call.reduction.factor;
  factors->assign(static_cast<size_t>(mesh.size()), mine);
  if (call.reduction.same_factor) return true;
  if (call.reduction.device_factor != nullptr) {
    mine = 0;
    std::memcpy(&mine, call.reduction.device_factor, ncclTypeBytes(call.type));
  }
  (*factors)[static_cast<size_t>(mesh.rank())] = mine;
  std::vector<Piece> sends, receives;
  for (const int p : peersOf(mesh)) {
    sends.push_back({p, reinterpret_cast<char*>(&mine), sizeof(mine)});
    receives.push_back({p, reinterpret_cast<char*>(&(*factors)[static_cast<size_t>(p)]), sizeof(mine)});
  }
  return exchange(mesh, slot(call, 3), sends, receives);
}

// Every rank r ends with the reduction of part r at `out`: direct exchange, then a sum in rank order.
bool reduceScatter(Mesh& mesh, const CollectiveCall& call, const Parts& parts, void* out) {
  const size_t width = ncclTypeBytes(call.type);
  auto* in = static_cast<char*>(const_cast<void*>(call.send));
  std::vector<uint64_t> factors;
  if (!shareFactors(mesh, call, &factors)) return false;
  const size_t mine = parts.size(mesh.rank());
  const std::unique_ptr<char[]> scratch(new char[mine * width * static_cast<size_t>(mesh.size() - 1) + 1]);
  std::vector<const void*> inputs(static_cast<size_t>(mesh.size()));
  inputs[static_cast<size_t>(mesh.rank())] = in + parts.begin(mesh.rank()) * width;
  std::vector<Piece> sends, receives;
  char* next = scratch.get();
  for (const int p : peersOf(mesh)) {
    receives.push_back({p, next, mine * width});
    inputs[static_cast<size_t>(p)] = next;
    next += mine * width;
  }
  for (const int p : peersOf(mesh)) sends.push_back({p, in + parts.begin(p) * width, parts.size(p) * width});
  if (!exchange(mesh, slot(call, 0), sends, receives)) return false;
  reduce(call.type, call.reduction.op, inputs, factors, out, mine);
  return true;
}

// Every rank's part of `buffer` goes to all others.
bool allGather(Mesh& mesh, const CollectiveCall& call, const Parts& parts, char* buffer) {
  const size_t width = ncclTypeBytes(call.type);
  std::vector<Piece> sends, receives;
  for (const int p : peersOf(mesh)) {
    sends.push_back({p, buffer + parts.begin(mesh.rank()) * width, parts.size(mesh.rank()) * width});
    receives.push_back({p, buffer + parts.begin(p) * width, parts.size(p) * width});
  }
  return exchange(mesh, slot(call, 1), sends, receives);
}

}  // namespace

void run(Mesh& mesh, const CollectiveCall& call) {
  const size_t width = ncclTypeBytes(call.type);
  const auto ranks = static_cast<size_t>(mesh.size());
  const auto rank = static_cast<size_t>(mesh.rank());
  auto* in = static_cast<char*>(const_cast<void*>(call.send));
  auto* out = static_cast<char*>(call.receive);
  const Parts shards{call.count, (call.count + ranks - 1) / ranks};
  const Parts equal{call.count * ranks, call.count};
  switch (call.kind) {
    case Collective::kAllReduce:
      if (reduceScatter(mesh, call, shards, out + shards.begin(mesh.rank()) * width)) {
        allGather(mesh, call, shards, out);
      }
      return;
    case Collective::kReduceScatter:
      reduceScatter(mesh, call, equal, out);
      return;
    case Collective::kAllGather:
      copy(out + rank * call.count * width, in, call.count * width);
      allGather(mesh, call, equal, out);
      return;
    case Collective::kBroadcast: {
      std::vector<Piece> sends, receives;
      if (mesh.rank() == call.root) {
        for (const int p : peersOf(mesh)) sends.push_back({p, in, call.count * width});
      } else {
        receives.push_back({call.root, out, call.count * width});
      }
      if (exchange(mesh, slot(call, 0), sends, receives) && mesh.rank() == call.root) {
        copy(out, in, call.count * width);
      }
      return;
    }
    case Collective::kReduce: {
      const size_t mine = shards.size(mesh.rank()) * width;
      const std::unique_ptr<char[]> part(new char[mine + 1]);
      if (!reduceScatter(mesh, call, shards, part.get())) return;
      std::vector<Piece> sends, receives;
      if (mesh.rank() == call.root) {
        for (const int p : peersOf(mesh))
          receives.push_back({p, out + shards.begin(p) * width, shards.size(p) * width});
        copy(out + shards.begin(mesh.rank()) * width, part.get(), mine);
      } else {
        sends.push_back({call.root, part.get(), mine});
      }
      exchange(mesh, slot(call, 1), sends, receives);
      return;
    }
    case Collective::kAlltoAll: {
      const size_t bytes = call.count * width;
      copy(out + rank * bytes, in + rank * bytes, bytes);
      std::vector<Piece> sends, receives;
      for (const int p : peersOf(mesh)) {
        sends.push_back({p, in + static_cast<size_t>(p) * bytes, bytes});
        receives.push_back({p, out + static_cast<size_t>(p) * bytes, bytes});
      }
      exchange(mesh, slot(call, 0), sends, receives);
      return;
    }
  }
}

void run(Mesh& mesh, const std::vector<PointToPoint>& calls) {
  std::vector<Piece> sends, receives;
  std::vector<const PointToPoint*> to_self, from_self;
  for (const PointToPoint& call : calls) {
    if (call.peer == mesh.rank()) {
      (call.sends ? to_self : from_self).push_back(&call);
    } else {
      (call.sends ? sends : receives).push_back({call.peer, static_cast<char*>(call.data), call.bytes});
    }
  }
  for (size_t i = 0; i < std::min(to_self.size(), from_self.size()); ++i) {
    copy(from_self[i]->data, to_self[i]->data, std::min(to_self[i]->bytes, from_self[i]->bytes));
  }
  exchange(mesh, kPointToPointSlot, sends, receives);
}

uint64_t egressBytes() { return egress.load(); }

}  // namespace halfwire::hostccl
