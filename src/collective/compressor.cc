#include "collective/compressor.h"

#include <algorithm>

namespace halfwire {
namespace {

constexpr uint64_t kRegionAlignment = 256;

// Passes in flight where they overlap; Schedule::overlapped says why.
constexpr uint32_t kSlots = 4;
// Into how many passes a message is cut so that they can overlap. What cannot overlap is the codec of the
// first and the last pass; against that, every pass costs messages, launches and the wait for the slowest
// rank.
constexpr uint64_t kPasses = 4;
constexpr uint64_t kLeastPassBytes = 2ull << 20;

uint32_t slots(const Compressor::Config& c) { return c.overlap ? kSlots : 1; }

// Of the user's buffer, the most that one pass takes.
uint64_t slotBytes(const Compressor::Config& c) { return c.chunk_bytes / slots(c); }

// Whether the buffer holds a part for each rank, and `count` counts one.
bool hasParts(CollectiveOp op) {
  return op != CollectiveOp::kAllReduce && op != CollectiveOp::kReduce && op != CollectiveOp::kBroadcast;
}

bool hasRoot(CollectiveOp op) {
  return op == CollectiveOp::kReduce || op == CollectiveOp::kBroadcast || op == CollectiveOp::kGather ||
         op == CollectiveOp::kScatter;
}

// Whether the buffer is summed in shards, one a rank, that are then brought together again.
bool sumsShards(CollectiveOp op) { return op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduce; }

uint64_t elementsOf(uint64_t bytes, const Compressor::Config& c, DataType type) {
  return std::max<uint64_t>(roundUp(bytes / dataTypeBytes(type), c.format.block), c.format.block);
}

// Scratch that a call's pass of `elements` takes: outgoing and incoming packets.
struct Footprint {
  uint64_t shard = 0;
  uint64_t packet = 0;
  uint64_t outgoing = 0;
  uint64_t incoming = 0;
  uint64_t total() const { return outgoing + incoming; }
};

Footprint footprint(const Compressor::Config& c, CollectiveOp op, bool one_shot, uint64_t elements) {
  Footprint f;
  f.shard = sumsShards(op) && !one_shot ? shardElements(c.format, elements, c.ranks) : elements;
  f.packet = packetBytes(c.format, f.shard);
  const uint64_t region = roundUp(f.packet * c.ranks, kRegionAlignment);
  const bool gathered = op == CollectiveOp::kAllGather || op == CollectiveOp::kGather || one_shot;
  f.outgoing = gathered || op == CollectiveOp::kBroadcast ? 0 : region;
  f.incoming = op == CollectiveOp::kBroadcast ? roundUp(f.packet, kRegionAlignment) : region;
  return f;
}

// Elements of a pass of `bytes`: of the whole buffer, or of each rank's part.
uint64_t passElements(const Compressor::Config& c, CollectiveOp op, DataType type, uint64_t bytes) {
  const uint64_t chunk = elementsOf(bytes, c, type);
  if (!hasParts(op)) return chunk;
  return std::max<uint64_t>(chunk / c.ranks / c.format.block * c.format.block, c.format.block);
}

uint64_t slotFootprint(const Compressor::Config& c) {
  uint64_t bytes = 0;
  // The other operations need no more than one of these.
  for (const CollectiveOp op : {CollectiveOp::kAllReduce, CollectiveOp::kReduceScatter,
                                CollectiveOp::kAllGather, CollectiveOp::kBroadcast}) {
    const bool one_shot = op == CollectiveOp::kAllReduce && c.ranks == 2;
    const uint64_t elements = passElements(c, op, DataType::kBf16, slotBytes(c));
    bytes = std::max(bytes, footprint(c, op, one_shot, elements).total());
  }
  return bytes;
}

ncclResult_t fail(const Status& status, std::string* error) {
  *error = status.message();
  return status.code() == StatusCode::kInvalidArgument ? ncclInvalidArgument : ncclUnhandledCudaError;
}

}  // namespace

uint64_t Compressor::scratchBytes(const Config& c) {
  if (c.noise) return 0;
  return slotFootprint(c) * slots(c);
}

Result<std::unique_ptr<Compressor>> Compressor::create(const NcclApi* api, Device* device,
                                                       const Config& config) {
  std::unique_ptr<Compressor> c(new Compressor);
  c->api_ = api;
  c->device_ = device;
  c->config_ = config;
  auto order = ScratchOrder::create(device);
  if (!order.ok()) return order.status();
  c->order_ = std::move(order).value();
  if (config.noise) return c;
  void* scratch = nullptr;
  if (Status s = device->allocate(scratchBytes(config), &scratch); !s.ok()) return s;
  c->scratch_ = static_cast<char*>(scratch);
  c->scratch_held_ = scratchBytes(config);
  if (!config.overlap) return c;
  if (Status s = device->createStream(&c->transfers_); !s.ok()) return s;
  if (Status s = device->createEvent(&c->ready_); !s.ok()) return s;
  if (Status s = device->createEvent(&c->moved_); !s.ok()) return s;
  return c;
}

void Compressor::useChunks(uint64_t chunk_bytes) {
  if (config_.noise || chunk_bytes >= config_.chunk_bytes) return;
  config_.chunk_bytes = chunk_bytes;
  void* scratch = nullptr;
  if (!device_->allocate(scratchBytes(config_), &scratch).ok()) return;
  device_->release(scratch_);
  scratch_ = static_cast<char*>(scratch);
  scratch_held_ = scratchBytes(config_);
}

Compressor::~Compressor() {
  if (device_ == nullptr || parked_) {
    order_.park();
    return;
  }
  order_.finish();
  if (scratch_ != nullptr) device_->release(scratch_);
  for (const EventHandle e : {ready_, moved_}) {
    if (e != nullptr) device_->destroyEvent(e);
  }
  if (transfers_ != nullptr) (void)device_->finishStream(transfers_);
}

void Compressor::park() { parked_ = true; }

bool Compressor::oneShot(const CompressedCall& call) const {
  return sumsShards(call.op) && config_.ranks == 2;
}

uint64_t Compressor::shardLength(const Piece& piece, uint32_t shard) const {
  const uint64_t start = piece.shard * shard;
  return start >= piece.elements ? 0 : std::min(piece.shard, piece.elements - start);
}

// Bytes of the user's buffers.
uint64_t Compressor::bytesOf(const CompressedCall& call, uint64_t elements) const {
  const uint64_t parts = hasParts(call.op) ? config_.ranks : 1;
  return elements * parts * dataTypeBytes(call.type);
}

// The longest pass of a message, in bytes.
uint64_t Compressor::passBytes(uint64_t message) const {
  if (!config_.overlap) return slotBytes(config_);
  return std::min(slotBytes(config_), std::max((message + kPasses - 1) / kPasses, kLeastPassBytes));
}

bool Compressor::overlaps(const CompressedCall& call) const {
  const uint64_t bytes = bytesOf(call, call.count);
  return config_.overlap && bytes > passBytes(bytes);
}

// Cuts the calls into passes and the passes into batches that fit a slot of the scratch. How a call is cut
// follows from its operation, type and count alone: a rank may call in a group what another calls by itself.
std::vector<std::vector<Compressor::Piece>> Compressor::plan(std::span<const CompressedCall> calls) const {
  uint64_t total = 0;
  for (const CompressedCall& call : calls) total += bytesOf(call, call.count);
  const uint64_t slot = slotFootprint(config_);
  const uint64_t batch_limit = passBytes(total);
  const bool overlapped = config_.overlap && total > batch_limit;
  std::vector<std::vector<Piece>> batches(1);
  uint64_t used = 0;
  uint64_t batch_bytes = 0;
  const auto next = [&] {
    batches.emplace_back();
    used = 0;
    batch_bytes = 0;
  };
  for (uint32_t i = 0; i < calls.size(); ++i) {
    const CompressedCall& call = calls[i];
    const uint64_t longest = passBytes(bytesOf(call, call.count));
    for (uint64_t offset = 0; offset < call.count;) {
      // What is first is half as long, and so mostly is what is last: nothing runs beside their codec.
      const bool half = overlaps(call) && offset == 0;
      const uint64_t pass = passElements(config_, call.op, call.type, half ? longest / 2 : longest);
      const uint64_t elements = std::min(pass, call.count - offset);
      const Footprint f = footprint(config_, call.op, oneShot(call), elements);
      const bool full = overlapped && batch_bytes >= (batches.size() == 1 ? batch_limit / 2 : batch_limit);
      if (used + f.total() > slot || full) next();
      const uint64_t start = (batches.size() - 1) % slots(config_) * slot + used;
      batches.back().push_back({i, offset, elements, f.shard, f.packet, start, start + f.outgoing});
      used += f.total();
      batch_bytes += bytesOf(call, elements);
      offset += elements;
    }
  }
  return batches;
}

// Whose shard an element of a sum is in follows from how the message is cut, and must not matter.
Rounding Compressor::rounding(const Piece& p, uint32_t phase) const {
  if (p.number == 0) return {};
  return {true, roundingKey(config_.seed, config_.number, p.number, phase == 0 ? config_.rank : 0, phase),
          p.offset};
}

Status Compressor::quantize(const CompressedCall& call, const Piece& p, StreamHandle stream) {
  QuantizeJob job;
  job.rounding = rounding(p, 0);
  job.format = config_.format;
  job.type = call.type;
  job.factor = call.factor;
  job.in = static_cast<const char*>(call.send) + p.offset * dataTypeBytes(call.type);
  job.out_pitch = p.packet;
  job.segment_elements = p.shard;
  if (call.op == CollectiveOp::kAllGather || call.op == CollectiveOp::kGather || oneShot(call) ||
      call.op == CollectiveOp::kBroadcast) {
    job.in_total = p.elements;
    job.in_pitch = p.elements;
    job.segments = 1;
    const uint32_t slot = call.op == CollectiveOp::kBroadcast ? 0 : config_.rank;
    job.out = scratch_ + p.incoming + slot * p.packet;
  } else if (sumsShards(call.op)) {
    job.in_total = p.elements;
    job.in_pitch = p.shard;
    job.segments = config_.ranks;
    job.out = scratch_ + p.outgoing;
  } else {  // the same stretch of every rank's part
    job.in_total = call.count * (config_.ranks - 1) + p.elements;
    job.in_pitch = call.count;
    job.segments = config_.ranks;
    job.out = scratch_ + p.outgoing;
  }
  if (Status s = device_->quantize(job, stream); !s.ok()) return s;
  if (call.op != CollectiveOp::kAlltoAll && call.op != CollectiveOp::kScatter) return {};
  const uint64_t own = config_.rank * p.packet;
  return device_->copy(scratch_ + p.incoming + own, scratch_ + p.outgoing + own, p.packet, stream);
}

// Sums the packets of my shard.
Status Compressor::reduce(const CompressedCall& call, const Piece& p, StreamHandle stream) {
  ReduceJob job;
  job.format = config_.format;
  job.type = call.type;
  job.packets = config_.ranks;
  job.in = scratch_ + p.incoming;
  job.in_pitch = p.packet;
  job.own = scratch_ + p.outgoing + config_.rank * p.packet;
  job.own_index = static_cast<int32_t>(config_.rank);
  job.average = call.average ? 1.0f / static_cast<float>(config_.ranks) : 1.0f;
  if (sumsShards(call.op)) {
    job.to_packet = true;
    job.rounding = rounding(p, 1);
    job.rounding.first += p.shard * config_.rank;
    job.elements = shardLength(p, config_.rank);
    job.out = scratch_ + p.incoming + config_.rank * p.packet;  // the slot that no peer writes
  } else {
    job.to_packet = false;
    job.elements = p.elements;
    job.out = static_cast<char*>(call.recv) + p.offset * dataTypeBytes(call.type);
  }
  return device_->reduce(job, stream);
}

// Turns gathered packets into the result.
Status Compressor::finish(const CompressedCall& call, const Piece& p, StreamHandle stream) {
  char* out = static_cast<char*>(call.recv) + p.offset * dataTypeBytes(call.type);
  if (oneShot(call)) {
    ReduceJob job;
    job.format = config_.format;
    job.type = call.type;
    job.packets = config_.ranks;
    job.in = scratch_ + p.incoming;
    job.in_pitch = p.packet;
    job.average = call.average ? 1.0f / static_cast<float>(config_.ranks) : 1.0f;
    job.to_packet = false;
    job.elements = p.elements;
    job.out = out;
    return device_->reduce(job, stream);
  }
  DequantizeJob job;
  job.format = config_.format;
  job.type = call.type;
  job.segments = config_.ranks;
  job.in = scratch_ + p.incoming;
  job.in_pitch = p.packet;
  job.segment_elements = p.shard;
  job.out = out;
  if (call.op == CollectiveOp::kBroadcast || call.op == CollectiveOp::kScatter) {
    job.segments = 1;
    job.in = scratch_ + p.incoming + (call.op == CollectiveOp::kScatter ? config_.rank * p.packet : 0);
    job.out_pitch = job.out_total = p.elements;
  } else if (sumsShards(call.op)) {
    job.out_pitch = p.shard;
    job.out_total = p.elements;
  } else {
    job.out_pitch = call.count;
    job.out_total = call.count * (config_.ranks - 1) + p.elements;
  }
  return device_->dequantize(job, stream);
}

// Sends every peer the packet of its shard and receives mine from every peer. Inside a real group.
ncclResult_t Compressor::exchange(const CompressedCall& call, const Piece& p, StreamHandle stream,
                                  CallStats* stats) {
  const auto length = [&](uint32_t shard) {
    return sumsShards(call.op) ? shardLength(p, shard) : p.elements;
  };
  const uint64_t mine = packetBytes(config_.format, length(config_.rank));
  const auto s = static_cast<cudaStream_t>(stream);
  // Start with the next rank, so that the ranks do not all begin with the same peer.
  for (uint32_t step = 1; step < config_.ranks; ++step) {
    const uint32_t to = (config_.rank + step) % config_.ranks;
    const uint32_t from = (config_.rank + config_.ranks - step) % config_.ranks;
    const uint64_t bytes = packetBytes(config_.format, length(to));
    if (bytes > 0) {
      const void* packet = scratch_ + p.outgoing + to * p.packet;
      const ncclResult_t r = api_->ncclSend(packet, bytes, ncclUint8, static_cast<int>(to), config_.comm, s);
      if (r != ncclSuccess) return r;
      stats->sent_bytes += bytes;
    }
    if (mine > 0) {
      void* slot = scratch_ + p.incoming + from * p.packet;
      const ncclResult_t r = api_->ncclRecv(slot, mine, ncclUint8, static_cast<int>(from), config_.comm, s);
      if (r != ncclSuccess) return r;
    }
  }
  return ncclSuccess;
}

// Between the root and the others: packets to it, for Reduce and Gather, or from it.
ncclResult_t Compressor::moveAtRoot(const CompressedCall& call, const Piece& p, StreamHandle stream,
                                    CallStats* stats) {
  const auto s = static_cast<cudaStream_t>(stream);
  char* incoming = scratch_ + p.incoming;
  if (call.op == CollectiveOp::kBroadcast) {
    stats->sent_bytes += p.packet;  // by every rank but the last of the ring
    return api_->ncclBroadcast(incoming, incoming, p.packet, ncclUint8, static_cast<int>(call.root),
                               config_.comm, s);
  }
  const bool to_root = call.op != CollectiveOp::kScatter;
  const auto bytesOfPacket = [&](uint32_t rank) {
    return sumsShards(call.op) && !oneShot(call) ? packetBytes(config_.format, shardLength(p, rank))
                                                 : p.packet;
  };
  const auto move = [&](bool send, char* packet, uint64_t bytes, uint32_t peer) {
    if (bytes == 0) return ncclSuccess;
    if (!send) return api_->ncclRecv(packet, bytes, ncclUint8, static_cast<int>(peer), config_.comm, s);
    stats->sent_bytes += bytes;
    return api_->ncclSend(packet, bytes, ncclUint8, static_cast<int>(peer), config_.comm, s);
  };
  if (!atRoot(call))
    return move(to_root, incoming + config_.rank * p.packet, bytesOfPacket(config_.rank), call.root);
  for (uint32_t step = 1; step < config_.ranks; ++step) {
    const uint32_t peer = (config_.rank + step) % config_.ranks;
    char* packet = (to_root ? incoming : scratch_ + p.outgoing) + peer * p.packet;
    const ncclResult_t r = move(!to_root, packet, bytesOfPacket(peer), peer);
    if (r != ncclSuccess) return r;
  }
  return ncclSuccess;
}

// Gathers every rank's packet in place. Packets of short last shards travel at full length. Messages whose
// passes overlap are gathered by sends and receives, which share a real group with those of an exchange.
ncclResult_t Compressor::gather(const CompressedCall& call, const Piece& p, StreamHandle stream,
                                CallStats* stats) {
  if (hasRoot(call.op)) return moveAtRoot(call, p, stream, stats);
  const auto s = static_cast<cudaStream_t>(stream);
  char* packets = scratch_ + p.incoming;
  const char* mine = packets + config_.rank * p.packet;
  stats->sent_bytes += p.packet * (config_.ranks - 1);
  if (!overlaps(call)) return api_->ncclAllGather(mine, packets, p.packet, ncclUint8, config_.comm, s);
  for (uint32_t step = 1; step < config_.ranks; ++step) {
    const uint32_t to = (config_.rank + step) % config_.ranks;
    const uint32_t from = (config_.rank + config_.ranks - step) % config_.ranks;
    ncclResult_t r = api_->ncclSend(mine, p.packet, ncclUint8, static_cast<int>(to), config_.comm, s);
    if (r != ncclSuccess) return r;
    r = api_->ncclRecv(packets + from * p.packet, p.packet, ncclUint8, static_cast<int>(from), config_.comm,
                       s);
    if (r != ncclSuccess) return r;
  }
  return ncclSuccess;
}

// The turns of a clique on their way: what each stage enqueues for one batch of all of them, and the order of
// the stages.
class Schedule {
 public:
  Schedule(std::span<CompressedTurn> turns, CallGate& gate, std::string* error) : gate_(gate), error_(error) {
    for (CompressedTurn& turn : turns) {
      if (turn.calls.empty()) continue;
      Run run;
      run.turn = &turn;
      run.c = turn.compressor;
      run.main = turn.calls.front().stream;
      for (const CompressedCall& call : turn.calls) addStream(call.stream, &run);
      for (const StreamHandle stream : turn.streams) addStream(stream, &run);
      if (!run.c->config_.noise) run.batches = run.c->plan(turn.calls);
      if (run.c->config_.stochastic && !run.c->config_.noise) check(number(run));
      turn.stats.assign(turn.calls.size(), {});
      batches_ = std::max(batches_, run.batches.size());
      runs_.push_back(std::move(run));
    }
    // A single batch has nothing to overlap with.
    overlapped_ = batches_ > 1 && runs_.front().c->config_.overlap;
    for (Run& run : runs_) run.transfers = overlapped_ ? run.c->transfers_ : run.main;
  }

  ncclResult_t run() {
    if (runs_.empty()) return ncclSuccess;
    for (Run& run : runs_) check(run.c->order_.begin(run.main, run.others));
    if (runs_.front().c->config_.noise) {
      noise();
    } else if (overlapped_) {
      overlapped();
    } else {
      inOrder();
    }
    for (Run& run : runs_) check(run.c->order_.end(run.main, run.others));
    return result_;
  }

 private:
  // One member's progress.
  struct Run {
    CompressedTurn* turn = nullptr;
    Compressor* c = nullptr;
    StreamHandle main = nullptr;       // of the codec
    StreamHandle transfers = nullptr;  // the same stream unless passes overlap
    std::vector<StreamHandle> others;
    std::vector<std::vector<Compressor::Piece>> batches;
  };
  using Member = ncclResult_t (Compressor::*)(const CompressedCall&, const Compressor::Piece&, StreamHandle,
                                              CallStats*);
  using Wants = bool (*)(const Compressor&, const CompressedCall&);
  // The pieces of a batch that one kind of transfer moves.
  struct Share {
    size_t batch;
    Wants wants;
    Member work;
  };

  static void addStream(StreamHandle stream, Run* run) {
    if (stream == run->main || std::find(run->others.begin(), run->others.end(), stream) != run->others.end())
      return;
    run->others.push_back(stream);
  }

  // What a call goes through on this rank: it quantizes; exchanges packets of parts or shards; sums what
  // came; gathers, or moves packets from or to a root; dequantizes.
  static bool quantizes(const Compressor& c, const CompressedCall& call) {
    const bool from_root = call.op == CollectiveOp::kBroadcast || call.op == CollectiveOp::kScatter;
    return !from_root || c.atRoot(call);
  }
  static bool exchanges(const Compressor& c, const CompressedCall& call) {
    return sums(c, call) || call.op == CollectiveOp::kAlltoAll;
  }
  static bool sums(const Compressor& c, const CompressedCall& call) {
    return call.op == CollectiveOp::kReduceScatter || (sumsShards(call.op) && !c.oneShot(call));
  }
  static bool gathers(const Compressor&, const CompressedCall& call) {
    return call.op != CollectiveOp::kReduceScatter && call.op != CollectiveOp::kAlltoAll;
  }
  static bool finishes(const Compressor& c, const CompressedCall& call) {
    const bool at_root = call.op == CollectiveOp::kReduce || call.op == CollectiveOp::kGather;
    return call.op != CollectiveOp::kReduceScatter && (!at_root || c.atRoot(call));
  }
  // Gathers of sums, and gathers that follow nothing but the quantizing.
  static bool gathersSums(const Compressor& c, const CompressedCall& call) {
    return gathers(c, call) && sums(c, call);
  }
  static bool gathersOnly(const Compressor& c, const CompressedCall& call) { return !exchanges(c, call); }
  // Ends behind a gather of sums, or behind the one move that there is.
  static bool finishesSums(const Compressor& c, const CompressedCall& call) {
    return finishes(c, call) && sums(c, call);
  }
  static bool finishesOnly(const Compressor& c, const CompressedCall& call) {
    return finishes(c, call) && !sums(c, call);
  }

  // What a replay of a graph would repeat is rounded to nearest, by every call of a capture: the counter of
  // calls does not advance there.
  static Status number(Run& run) {
    uint64_t capture = 0;
    if (Status s = run.c->device_->captureOf(run.main, &capture); !s.ok()) return s;
    if (capture != 0) return {};
    for (auto& batch : run.batches) {
      for (Compressor::Piece& piece : batch) piece.number = run.c->calls_ + piece.call + 1;
    }
    run.c->calls_ += run.turn->calls.size();
    return {};
  }

  // Nothing is enqueued after a failure.
  void check(const Status& status) {
    if (result_ == ncclSuccess && !status.ok()) result_ = fail(status, error_);
  }

  // Calls `work` on every piece of `batch` that `wants` chooses. No batch has the number -1 or less.
  template <class Work>
  void eachPiece(size_t batch, Wants wants, Work work) {
    for (Run& run : runs_) {
      if (batch >= run.batches.size()) continue;
      for (const Compressor::Piece& piece : run.batches[batch]) {
        const CompressedCall& call = run.turn->calls[piece.call];
        if (wants(*run.c, call)) work(run, call, piece);
      }
    }
  }

  void codec(size_t batch, Wants wants,
             Status (Compressor::*work)(const CompressedCall&, const Compressor::Piece&, StreamHandle)) {
    eachPiece(batch, wants, [&](Run& run, const CompressedCall& call, const Compressor::Piece& piece) {
      if (result_ != ncclSuccess) return;
      check((run.c->*work)(call, piece, run.main));
      ++run.turn->stats[piece.call].launches;
    });
  }

  // One real group over all members, none if there is nothing to move.
  void transfer(std::initializer_list<Share> shares) {
    bool any = false;
    for (const Share& share : shares)
      eachPiece(share.batch, share.wants, [&](Run&, const auto&, const auto&) { any = true; });
    if (!any || result_ != ncclSuccess) return;
    if (!gate_.enter()) return refuseAborted();
    const NcclApi* api = runs_.front().c->api_;
    ncclResult_t result = api->ncclGroupStart();
    for (const Share& share : shares) {
      eachPiece(share.batch, share.wants, [&](Run& run, const CompressedCall& call, const auto& piece) {
        if (result != ncclSuccess) return;
        result = (run.c->*share.work)(call, piece, run.transfers, &run.turn->stats[piece.call]);
      });
    }
    // The group must be closed whatever happened inside it.
    const ncclResult_t end = api->ncclGroupEnd();
    gate_.leave();
    result_ = result != ncclSuccess ? result : end;
  }

  void inOrder() {
    for (size_t batch = 0; batch < batches_; ++batch) {
      codec(batch, quantizes, &Compressor::quantize);
      transfer({{batch, exchanges, &Compressor::exchange}});
      codec(batch, sums, &Compressor::reduce);
      transfer({{batch, gathers, &Compressor::gather}});
      codec(batch, finishes, &Compressor::finish);
    }
  }

  void noise() {
    if (!gate_.enter()) return refuseAborted();
    const NcclApi* api = runs_.front().c->api_;
    ncclResult_t result = api->ncclGroupStart();
    for (Run& run : runs_) {
      for (const CompressedCall& call : run.turn->calls) {
        if (result == ncclSuccess) result = exactly(*api, call, *run.c, run.main);
      }
    }
    const ncclResult_t end = api->ncclGroupEnd();
    gate_.leave();
    result_ = result != ncclSuccess ? result : end;
    for (Run& run : runs_) {
      for (size_t i = 0; i < run.turn->calls.size() && result_ == ncclSuccess; ++i) {
        const CompressedCall& call = run.turn->calls[i];
        PerturbJob job{call.type, call.recv, call.count, run.c->config_.seed + (++run.c->noised_ << 40)};
        check(run.c->device_->perturb(job, run.main));
        ++run.turn->stats[i].launches;
      }
    }
  }

  static ncclResult_t exactly(const NcclApi& api, const CompressedCall& call, const Compressor& c,
                              StreamHandle stream) {
    const auto reduce = call.op == CollectiveOp::kAllReduce ? api.ncclAllReduce : api.ncclReduceScatter;
    return reduce(call.send, call.recv, call.count, ncclDataType(call.type), call.average ? ncclAvg : ncclSum,
                  c.config_.comm, static_cast<cudaStream_t>(stream));
  }

  void refuseAborted() {
    *error_ = "the communicator was aborted while a collective was being enqueued";
    result_ = ncclRemoteError;
  }

  // In step j the link exchanges batch j and gathers batch j-2 in one real group, so that ranks wait for each
  // other once a step, while the codec reduces batch j-1, finishes batch j-3 and quantizes batch j+1 into the
  // same slot. What has no exchange is gathered in step j and finished in the next.
  void overlapped() {
    codec(0, quantizes, &Compressor::quantize);
    signal(&Compressor::ready_, &Run::main);
    for (size_t j = 0; j < batches_ + 2; ++j) {
      await(&Compressor::ready_, &Run::transfers);
      if (j > 0) await(&Compressor::moved_, &Run::main);
      transfer({{j, exchanges, &Compressor::exchange},
                {j - 2, gathersSums, &Compressor::gather},
                {j, gathersOnly, &Compressor::gather}});
      signal(&Compressor::moved_, &Run::transfers);
      codec(j - 1, sums, &Compressor::reduce);
      codec(j - 3, finishesSums, &Compressor::finish);
      codec(j - 1, finishesOnly, &Compressor::finish);
      codec(j + 1, quantizes, &Compressor::quantize);
      signal(&Compressor::ready_, &Run::main);
    }
    await(&Compressor::moved_, &Run::main);
    codec(batches_ - 1, finishesSums, &Compressor::finish);
  }

  // What a member's two streams tell each other. Each event is awaited before it is recorded again.
  void signal(EventHandle Compressor::* event, StreamHandle Run::* stream) {
    for (Run& run : runs_) {
      if (result_ == ncclSuccess) check(run.c->device_->recordEvent(run.c->*event, run.*stream));
    }
  }
  void await(EventHandle Compressor::* event, StreamHandle Run::* stream) {
    for (Run& run : runs_) {
      if (result_ == ncclSuccess) check(run.c->device_->waitEvent(run.*stream, run.c->*event));
    }
  }

  CallGate& gate_;
  std::string* error_;
  std::vector<Run> runs_;
  size_t batches_ = 0;
  bool overlapped_ = false;
  ncclResult_t result_ = ncclSuccess;
};

ncclResult_t runCompressed(std::span<CompressedTurn> turns, CallGate& gate, std::string* error) {
  return Schedule(turns, gate, error).run();
}

ncclResult_t connectPeers(std::span<Compressor* const> members, CallGate& gate, std::string* error) {
  struct Member {
    Compressor* compressor;
    StreamHandle stream;
    Compressor::Piece piece;
  };
  std::vector<Member> ready;
  const auto finish = [&](ncclResult_t result) {
    for (const Member& m : ready) {
      const Status s = m.compressor->device_->finishStream(m.stream);
      if (result == ncclSuccess && !s.ok()) result = fail(s, error);
    }
    return result;
  };
  for (Compressor* c : members) {
    Member m{c, nullptr, {}};
    if (Status s = c->device_->createStream(&m.stream); !s.ok()) return finish(fail(s, error));
    // A size at which NCCL uses the channels and algorithms that it uses for large messages.
    const uint64_t elements = std::min<uint64_t>(
        passElements(c->config_, CollectiveOp::kReduceScatter, DataType::kBf16, slotBytes(c->config_)),
        1u << 20);
    const Footprint f = footprint(c->config_, CollectiveOp::kReduceScatter, false, elements);
    m.piece = {0, 0, elements, f.shard, f.packet, 0, f.outgoing};
    ready.push_back(m);
  }
  const CompressedCall call{CollectiveOp::kReduceScatter};
  for (const bool gathering : {false, true}) {
    if (!gate.enter()) {
      *error = "the communicator was aborted while its ranks were being connected";
      return finish(ncclRemoteError);
    }
    const NcclApi* api = ready.front().compressor->api_;
    ncclResult_t result = api->ncclGroupStart();
    for (const Member& m : ready) {
      if (result != ncclSuccess) break;
      CallStats unused;
      result = gathering ? m.compressor->gather(call, m.piece, m.stream, &unused)
                         : m.compressor->exchange(call, m.piece, m.stream, &unused);
    }
    const ncclResult_t end = api->ncclGroupEnd();
    gate.leave();
    if (result == ncclSuccess) result = end;
    if (result != ncclSuccess) return finish(result);
  }
  return finish(ncclSuccess);
}

}  // namespace halfwire
