#include "hostccl/collectives.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <set>

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

// Both ends of a message cut it alike, so these depend on nothing but whether links are emulated, which all
// members agree on when they meet.
constexpr size_t kPacedChunk = 64 << 10;
constexpr size_t kSegment =
    512 << 10;  // of a reduction: large enough to cost little, small enough to stay cached

struct Piece {
  int peer;
  char* data;
  size_t bytes;
};

// Peers in an order in which not everybody turns to the same one first.
std::vector<int> peersOf(const Mesh& mesh) {
  std::vector<int> peers;
  for (int step = 1; step < mesh.size(); ++step) peers.push_back((mesh.rank() + step) % mesh.size());
  return peers;
}

// The messages of one operation. Every function is false (or null) once the mesh has failed.
class Flow {
 public:
  explicit Flow(Mesh& mesh) : mesh_(mesh), ready_(Link::Clock::now()) {}

  bool send(int peer, uint64_t slot, const void* data, size_t bytes) {
    if (bytes == 0) return true;
    if (Link* link = mesh_.link()) {
      ready_ = link->depart(bytes, ready_);
      if (!mesh_.sleepUntil(ready_)) return false;
    }
    auto message = mesh_.send(peer, slot, data, bytes);
    if (!message) return false;
    egress += bytes;
    messages_.push_back(std::move(message));
    return true;
  }

  Message* receive(int peer, uint64_t slot, void* data, size_t bytes) {
    auto message = mesh_.receive(peer, slot, data, bytes);
    if (!message) return nullptr;
    messages_.push_back(std::move(message));
    return messages_.back().get();
  }

  // What is sent next depended on `message`: if it was late, the link has stood idle.
  bool depend(Message* message) {
    const auto before = Link::Clock::now();
    if (!message->wait()) return false;
    waited_.insert(message);
    if (mesh_.link() == nullptr) return true;
    const auto after = Link::Clock::now();
    if (after - before > std::chrono::milliseconds(1)) ready_ = std::max(ready_, after);
    return true;
  }

  bool finish() {
    for (const auto& message : messages_) {
      if (waited_.count(message.get()) == 0 && !message->wait()) return false;
    }
    return mesh_.link() == nullptr || mesh_.sleepUntil(mesh_.link()->ingressFree());
  }

 private:
  Mesh& mesh_;
  Link::Time ready_;
  std::vector<std::unique_ptr<Message>> messages_;
  std::set<const Message*> waited_;
};

// All sends and receives at once, those of different peers side by side, those of one peer in order.
bool exchange(Mesh& mesh, uint64_t slot, const std::vector<Piece>& sends,
              const std::vector<Piece>& receives) {
  const size_t chunk = mesh.link() != nullptr ? kPacedChunk : SIZE_MAX;
  Flow flow(mesh);
  for (const Piece& p : receives) {
    for (size_t at = 0; at < p.bytes; at += std::min(chunk, p.bytes - at)) {
      if (!flow.receive(p.peer, slot, p.data + at, std::min(chunk, p.bytes - at))) return false;
    }
  }
  std::vector<std::deque<Piece>> queues(static_cast<size_t>(mesh.size()));
  for (const Piece& p : sends) {
    if (p.bytes > 0) queues[static_cast<size_t>(p.peer)].push_back(p);
  }
  const std::vector<int> peers = peersOf(mesh);
  for (bool any = true; any;) {
    any = false;
    for (const int peer : peers) {
      auto& queue = queues[static_cast<size_t>(peer)];
      if (queue.empty()) continue;
      any = true;
      Piece& p = queue.front();
      const size_t n = std::min(chunk, p.bytes);
      if (!flow.send(peer, slot, p.data, n)) return false;
      p.data += n;
      p.bytes -= n;
      if (p.bytes == 0) queue.pop_front();
    }
  }
  return flow.finish();
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

// Who gets the reduced parts.
enum class Gather { kNobody, kEverybody, kRoot };

// Part r of all ranks' buffers goes to rank r, which reduces it, in rank order, into its part of `out`, and
// passes it on: 2 (W - 1) / W of the buffer leaves and enters every rank of an AllReduce, as in a ring. Cut
// into segments; the reduced ones follow `kLag` segments behind the raw ones, so that the links never wait
// for the arithmetic and the scratch is small.
class ReducePipeline {
 public:
  // `own` is where part `rank` goes; `full` the whole of the output where this rank gathers.
  ReducePipeline(Mesh& mesh, const CollectiveCall& call, Parts parts, char* own, Gather gather, char* full)
      : mesh_(mesh),
        call_(call),
        parts_(parts),
        own_(own),
        full_(full),
        gather_(gather),
        width_(ncclTypeBytes(call.type)),
        elements_((mesh.link() != nullptr ? kPacedChunk : kSegment) / width_),
        segments_((parts.part + elements_ - 1) / elements_),
        lag_(mesh.link() != nullptr ? 4 : 1),
        depth_(std::min(segments_, lag_ + 2)),
        peers_(peersOf(mesh)),
        stride_(std::min(elements_, parts.part) * width_),
        scratch_(mesh.scratch(depth_ * peers_.size() * stride_ + 1)),
        arriving_(depth_),
        flow_(mesh) {}

  bool run() {
    if (!shareFactors(mesh_, call_, &factors_)) return false;
    for (size_t k = 0; k < segments_ + lag_; ++k) {
      if (k < segments_ && !scatter(k)) return false;
      if (k >= lag_ && !reduceAndPass(k - lag_)) return false;
    }
    return flow_.finish();
  }

 private:
  size_t segment(int rank, size_t k) const {
    const size_t size = parts_.size(rank), begin = std::min(size, k * elements_);
    return std::min(elements_, size - begin) * width_;
  }
  char* scratch(size_t k, size_t peer) { return scratch_ + ((k % depth_) * peers_.size() + peer) * stride_; }

  bool post(size_t k) {
    if (k >= segments_) return true;
    auto& arriving = arriving_[k % depth_];
    arriving.clear();
    const size_t bytes = segment(mesh_.rank(), k);
    for (size_t i = 0; i < peers_.size() && bytes > 0; ++i) {
      arriving.push_back(flow_.receive(peers_[i], slot(call_, 0), scratch(k, i), bytes));
      if (arriving.back() == nullptr) return false;
    }
    const bool takes =
        gather_ == Gather::kEverybody || (gather_ == Gather::kRoot && mesh_.rank() == call_.root);
    for (size_t i = 0; i < peers_.size() && takes; ++i) {
      const int p = peers_[i];
      char* to = full_ + parts_.begin(p) * width_ + k * elements_ * width_;
      if (segment(p, k) > 0 && !flow_.receive(p, slot(call_, 1), to, segment(p, k))) return false;
    }
    return true;
  }

  bool scatter(size_t k) {
    if (k == 0) {
      for (size_t first = 0; first < depth_; ++first) {
        if (!post(first)) return false;
      }
    }
    const auto* in = static_cast<const char*>(call_.send);
    for (const int p : peers_) {
      const char* from = in + (parts_.begin(p) + k * elements_) * width_;
      if (!flow_.send(p, slot(call_, 0), from, segment(p, k))) return false;
    }
    return true;
  }

  bool reduceAndPass(size_t k) {
    for (Message* message : arriving_[k % depth_]) {
      if (!flow_.depend(message)) return false;
    }
    const size_t bytes = segment(mesh_.rank(), k);
    char* const to = own_ + k * elements_ * width_;
    if (bytes > 0) {
      std::vector<const void*> inputs(static_cast<size_t>(mesh_.size()));
      inputs[static_cast<size_t>(mesh_.rank())] =
          static_cast<const char*>(call_.send) + (parts_.begin(mesh_.rank()) + k * elements_) * width_;
      for (size_t i = 0; i < peers_.size(); ++i) inputs[static_cast<size_t>(peers_[i])] = scratch(k, i);
      reduce(call_.type, call_.reduction.op, inputs, factors_, to, bytes / width_);
    }
    if (!post(k + depth_)) return false;
    for (const int p : peers_) {
      const bool gets = gather_ == Gather::kEverybody || (gather_ == Gather::kRoot && p == call_.root);
      if (gets && !flow_.send(p, slot(call_, 1), to, bytes)) return false;
    }
    return true;
  }

  Mesh& mesh_;
  const CollectiveCall& call_;
  const Parts parts_;
  char* const own_;
  char* const full_;
  const Gather gather_;
  const size_t width_, elements_, segments_, lag_, depth_;
  const std::vector<int> peers_;
  const size_t stride_;
  char* const scratch_;
  std::vector<std::vector<Message*>> arriving_;
  std::vector<uint64_t> factors_;
  Flow flow_;
};

// Along a chain that starts at the root, chunk by chunk: every link carries the buffer once, as in a ring.
void broadcast(Mesh& mesh, const CollectiveCall& call, char* in, char* out, size_t bytes) {
  const size_t chunk = mesh.link() != nullptr ? kPacedChunk : kSegment;
  const int position = (mesh.rank() - call.root + mesh.size()) % mesh.size();
  const int before = (mesh.rank() + mesh.size() - 1) % mesh.size();
  const int after = (mesh.rank() + 1) % mesh.size();
  Flow flow(mesh);
  std::vector<Message*> arriving;
  for (size_t at = 0; at < bytes && position > 0; at += chunk) {
    arriving.push_back(flow.receive(before, slot(call, 0), out + at, std::min(chunk, bytes - at)));
    if (arriving.back() == nullptr) return;
  }
  for (size_t at = 0; at < bytes && position + 1 < mesh.size(); at += chunk) {
    if (position > 0 && !flow.depend(arriving[at / chunk])) return;
    const char* from = position > 0 ? out : in;
    if (!flow.send(after, slot(call, 0), from + at, std::min(chunk, bytes - at))) return;
  }
  if (flow.finish() && position == 0) copy(out, in, bytes);
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
  const size_t bytes = call.count * width;
  switch (call.kind) {
    case Collective::kAllReduce:
      ReducePipeline(mesh, call, shards, out + shards.begin(mesh.rank()) * width, Gather::kEverybody, out)
          .run();
      return;
    case Collective::kReduceScatter:
      ReducePipeline(mesh, call, equal, out, Gather::kNobody, nullptr).run();
      return;
    case Collective::kReduce: {
      if (mesh.rank() == call.root) {
        ReducePipeline(mesh, call, shards, out + shards.begin(mesh.rank()) * width, Gather::kRoot, out).run();
        return;
      }
      const std::unique_ptr<char[]> part(new char[shards.size(mesh.rank()) * width + 1]);
      ReducePipeline(mesh, call, shards, part.get(), Gather::kRoot, nullptr).run();
      return;
    }
    case Collective::kBroadcast:
      broadcast(mesh, call, in, out, bytes);
      return;
    case Collective::kAllGather: {
      copy(out + rank * bytes, in, bytes);
      std::vector<Piece> sends, receives;
      for (const int p : peersOf(mesh)) {
        sends.push_back({p, out + rank * bytes, bytes});
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
