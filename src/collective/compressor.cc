#include "collective/compressor.h"

#include <algorithm>

namespace halfwire {
namespace {

constexpr uint64_t kRegionAlignment = 256;

uint64_t chunkElements(const Compressor::Config& c, DataType type) {
  return std::max<uint64_t>(roundUp(c.chunk_bytes / dataTypeBytes(type), c.format.block), c.format.block);
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
  f.shard =
      op == CollectiveOp::kAllReduce && !one_shot ? shardElements(c.format, elements, c.ranks) : elements;
  f.packet = packetBytes(c.format, f.shard);
  const uint64_t region = roundUp(f.packet * c.ranks, kRegionAlignment);
  f.outgoing = op == CollectiveOp::kAllGather || one_shot ? 0 : region;
  f.incoming = region;
  return f;
}

// Elements of one pass: of the whole buffer for AllReduce, of each rank's part for the others.
uint64_t passElements(const Compressor::Config& c, CollectiveOp op, DataType type) {
  const uint64_t chunk = chunkElements(c, type);
  if (op == CollectiveOp::kAllReduce) return chunk;
  return std::max<uint64_t>(chunk / c.ranks / c.format.block * c.format.block, c.format.block);
}

ncclResult_t fail(const Status& status, std::string* error) {
  *error = status.message();
  return status.code() == StatusCode::kInvalidArgument ? ncclInvalidArgument : ncclUnhandledCudaError;
}

}  // namespace

uint64_t Compressor::scratchBytes(const Config& c) {
  uint64_t bytes = 0;
  for (const CollectiveOp op :
       {CollectiveOp::kAllReduce, CollectiveOp::kReduceScatter, CollectiveOp::kAllGather}) {
    const bool one_shot = op == CollectiveOp::kAllReduce && c.ranks == 2;
    bytes = std::max(bytes, footprint(c, op, one_shot, passElements(c, op, DataType::kBf16)).total());
  }
  return bytes;
}

Result<std::unique_ptr<Compressor>> Compressor::create(const NcclApi* api, Device* device,
                                                       const Config& config) {
  std::unique_ptr<Compressor> c(new Compressor);
  c->api_ = api;
  c->device_ = device;
  c->config_ = config;
  if (Status s = device->createEvent(&c->last_use_); !s.ok()) return s;
  void* scratch = nullptr;
  if (Status s = device->allocate(scratchBytes(config), &scratch); !s.ok()) return s;
  c->scratch_ = static_cast<char*>(scratch);
  return c;
}

Compressor::~Compressor() {
  if (device_ == nullptr) return;
  if (used_) (void)device_->synchronizeEvent(last_use_);
  if (scratch_ != nullptr) device_->release(scratch_);
  if (last_use_ != nullptr) device_->destroyEvent(last_use_);
  for (const EventHandle e : events_) device_->destroyEvent(e);
}

void Compressor::park() { device_ = nullptr; }

bool Compressor::oneShot(const CompressedCall& call) const {
  return call.op == CollectiveOp::kAllReduce && config_.ranks == 2;
}

uint64_t Compressor::shardLength(const Piece& piece, uint32_t shard) const {
  const uint64_t start = piece.shard * shard;
  return start >= piece.elements ? 0 : std::min(piece.shard, piece.elements - start);
}

// Cuts the calls into passes and the passes into batches that fit the scratch: a function of the calls'
// operations, types and counts alone, so every rank cuts alike.
std::vector<std::vector<Compressor::Piece>> Compressor::plan(std::span<const CompressedCall> calls) const {
  const uint64_t capacity = scratchBytes(config_);
  std::vector<std::vector<Piece>> batches(1);
  uint64_t used = 0;
  for (uint32_t i = 0; i < calls.size(); ++i) {
    const CompressedCall& call = calls[i];
    const uint64_t pass = passElements(config_, call.op, call.type);
    for (uint64_t offset = 0; offset < call.count; offset += pass) {
      const uint64_t elements = std::min(pass, call.count - offset);
      const Footprint f = footprint(config_, call.op, oneShot(call), elements);
      if (used + f.total() > capacity) {
        batches.emplace_back();
        used = 0;
      }
      batches.back().push_back({i, offset, elements, f.shard, f.packet, used, used + f.outgoing});
      used += f.total();
    }
  }
  return batches;
}

Status Compressor::quantize(const CompressedCall& call, const Piece& p, StreamHandle stream) {
  QuantizeJob job;
  job.format = config_.format;
  job.type = call.type;
  job.factor = call.factor;
  job.in = static_cast<const char*>(call.send) + p.offset * dataTypeBytes(call.type);
  job.out_pitch = p.packet;
  job.segment_elements = p.shard;
  if (call.op == CollectiveOp::kAllGather || oneShot(call)) {
    job.in_total = p.elements;
    job.in_pitch = p.elements;
    job.segments = 1;
    job.out = scratch_ + p.incoming + config_.rank * p.packet;
  } else if (call.op == CollectiveOp::kAllReduce) {
    job.in_total = p.elements;
    job.in_pitch = p.shard;
    job.segments = config_.ranks;
    job.out = scratch_ + p.outgoing;
  } else {  // ReduceScatter: the same stretch of every rank's part
    job.in_total = call.count * (config_.ranks - 1) + p.elements;
    job.in_pitch = call.count;
    job.segments = config_.ranks;
    job.out = scratch_ + p.outgoing;
  }
  return device_->quantize(job, stream);
}

// Sums the packets of my shard (two-shot, ReduceScatter).
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
  if (call.op == CollectiveOp::kAllReduce) {
    job.to_packet = true;
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
  if (call.op == CollectiveOp::kAllReduce) {
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
    return call.op == CollectiveOp::kAllReduce ? shardLength(p, shard) : p.elements;
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

// Gathers every rank's packet in place. Packets of short last shards travel at full length.
ncclResult_t Compressor::gather(const CompressedCall&, const Piece& p, StreamHandle stream,
                                CallStats* stats) {
  char* packets = scratch_ + p.incoming;
  stats->sent_bytes += p.packet * (config_.ranks - 1);
  return api_->ncclAllGather(packets + config_.rank * p.packet, packets, p.packet, ncclUint8, config_.comm,
                             static_cast<cudaStream_t>(stream));
}

Status Compressor::event(size_t index, EventHandle* out) {
  while (events_.size() <= index) {
    EventHandle e = nullptr;
    if (Status s = device_->createEvent(&e); !s.ok()) return s;
    events_.push_back(e);
  }
  *out = events_[index];
  return {};
}

// Orders the main stream behind the other streams and behind the scratch's last use.
Status Compressor::begin(StreamHandle main, std::span<const StreamHandle> others) {
  if (used_ && last_stream_ != main) {
    if (Status s = device_->waitEvent(main, last_use_); !s.ok()) return s;
  }
  for (size_t i = 0; i < others.size(); ++i) {
    EventHandle e = nullptr;
    if (Status s = event(i, &e); !s.ok()) return s;
    if (Status s = device_->recordEvent(e, others[i]); !s.ok()) return s;
    if (Status s = device_->waitEvent(main, e); !s.ok()) return s;
  }
  return {};
}

Status Compressor::end(StreamHandle main, std::span<const StreamHandle> others) {
  if (Status s = device_->recordEvent(last_use_, main); !s.ok()) return s;
  used_ = true;
  last_stream_ = main;
  for (const StreamHandle other : others) {
    if (Status s = device_->waitEvent(other, last_use_); !s.ok()) return s;
  }
  return {};
}

namespace {

// One member's progress through runCompressed.
struct Run {
  CompressedTurn* turn = nullptr;
  StreamHandle main = nullptr;
  std::vector<StreamHandle> others;
  std::vector<std::vector<Compressor::Piece>> batches;
};

void addStream(StreamHandle stream, Run* run) {
  if (stream == run->main || std::find(run->others.begin(), run->others.end(), stream) != run->others.end())
    return;
  run->others.push_back(stream);
}

}  // namespace

ncclResult_t runCompressed(std::span<CompressedTurn> turns, CallGate& gate, std::string* error) {
  std::vector<Run> runs;
  size_t batch_count = 0;
  for (CompressedTurn& turn : turns) {
    if (turn.calls.empty()) continue;
    Run run;
    run.turn = &turn;
    run.main = turn.calls.front().stream;
    for (const CompressedCall& call : turn.calls) addStream(call.stream, &run);
    for (const StreamHandle stream : turn.streams) addStream(stream, &run);
    run.batches = turn.compressor->plan(turn.calls);
    turn.stats.assign(turn.calls.size(), {});
    batch_count = std::max(batch_count, run.batches.size());
    runs.push_back(std::move(run));
  }
  if (runs.empty()) return ncclSuccess;
  const NcclApi* api = runs.front().turn->compressor->api_;

  // Whether a stage touches a piece at all.
  const auto exchanges = [](const Compressor& c, const CompressedCall& call) {
    return call.op == CollectiveOp::kReduceScatter ||
           (call.op == CollectiveOp::kAllReduce && !c.oneShot(call));
  };
  const auto gathers = [](const CompressedCall& call) { return call.op != CollectiveOp::kReduceScatter; };

  Status status;
  const auto codec = [&](size_t batch, auto&& wants, auto&& work) {
    for (Run& run : runs) {
      if (batch >= run.batches.size()) continue;
      Compressor& c = *run.turn->compressor;
      for (const Compressor::Piece& piece : run.batches[batch]) {
        const CompressedCall& call = run.turn->calls[piece.call];
        if (!wants(c, call)) continue;
        status = work(c, call, piece, run.main);
        if (!status.ok()) return false;
        ++run.turn->stats[piece.call].launches;
      }
    }
    return true;
  };
  // One real group over all members, none if no piece wants it.
  const auto group = [&](size_t batch, auto&& wants, auto&& work) -> ncclResult_t {
    bool any = false;
    for (const Run& run : runs) {
      if (batch >= run.batches.size()) continue;
      for (const Compressor::Piece& piece : run.batches[batch]) {
        any = any || wants(*run.turn->compressor, run.turn->calls[piece.call]);
      }
    }
    if (!any) return ncclSuccess;
    if (!gate.enter()) {
      *error = "the communicator was aborted while a compressed collective was being enqueued";
      return ncclRemoteError;
    }
    ncclResult_t result = api->ncclGroupStart();
    for (Run& run : runs) {
      if (result != ncclSuccess || batch >= run.batches.size()) continue;
      for (const Compressor::Piece& piece : run.batches[batch]) {
        const CompressedCall& call = run.turn->calls[piece.call];
        if (result != ncclSuccess || !wants(*run.turn->compressor, call)) continue;
        result = work(*run.turn->compressor, call, piece, run.main, &run.turn->stats[piece.call]);
      }
    }
    // The group must be closed whatever happened inside it.
    const ncclResult_t end = api->ncclGroupEnd();
    gate.leave();
    return result != ncclSuccess ? result : end;
  };

  for (Run& run : runs) {
    status = run.turn->compressor->begin(run.main, run.others);
    if (!status.ok()) return fail(status, error);
  }
  for (size_t batch = 0; batch < batch_count; ++batch) {
    const auto all = [](const Compressor&, const CompressedCall&) { return true; };
    const auto gatheringOnly = [&](const Compressor&, const CompressedCall& call) { return gathers(call); };
    if (!codec(batch, all,
               [](Compressor& c, const CompressedCall& call, const Compressor::Piece& p, StreamHandle s) {
                 return c.quantize(call, p, s);
               })) {
      return fail(status, error);
    }
    ncclResult_t result =
        group(batch, exchanges,
              [](Compressor& c, const CompressedCall& call, const Compressor::Piece& p, StreamHandle s,
                 CallStats* stats) { return c.exchange(call, p, s, stats); });
    if (result != ncclSuccess) return result;
    if (!codec(batch, exchanges,
               [](Compressor& c, const CompressedCall& call, const Compressor::Piece& p, StreamHandle s) {
                 return c.reduce(call, p, s);
               })) {
      return fail(status, error);
    }
    result = group(batch, gatheringOnly,
                   [](Compressor& c, const CompressedCall& call, const Compressor::Piece& p, StreamHandle s,
                      CallStats* stats) { return c.gather(call, p, s, stats); });
    if (result != ncclSuccess) return result;
    if (!codec(batch, gatheringOnly,
               [](Compressor& c, const CompressedCall& call, const Compressor::Piece& p, StreamHandle s) {
                 return c.finish(call, p, s);
               })) {
      return fail(status, error);
    }
  }
  for (Run& run : runs) {
    status = run.turn->compressor->end(run.main, run.others);
    if (!status.ok()) return fail(status, error);
  }
  return ncclSuccess;
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
    const uint64_t elements =
        std::min<uint64_t>(passElements(c->config_, CollectiveOp::kReduceScatter, DataType::kBf16), 1u << 20);
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
