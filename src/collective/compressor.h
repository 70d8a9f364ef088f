// Compressed collectives of one communicator, written against a table of NCCL calls and a device.
//
// AllReduce, two-shot: quantize the buffer in one packet per shard, send each packet to the shard's owner,
// sum the packets in rank order and requantize, gather the sums, dequantize. At two ranks one-shot: gather
// both packets and sum them. Reduce is the same with the sums gathered at the root alone, whose result has
// AllReduce's bits. ReduceScatter is the first half of the two-shot. AllGather, Gather, Scatter, AlltoAll and
// Broadcast are quantize, move, dequantize, also for what a rank keeps: no result depends on where a part
// came from. All bytes move as ncclUint8. Messages of any size stream through a scratch of fixed size in
// passes. Where the codec takes long next to the links, passes overlap: the scratch is cut in slots, the
// codec works on the program's stream, the transfers on a stream of our own, and the codec of one pass runs
// beside the transfers of its neighbours.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/nccl_api.h"
#include "collective/scratch_order.h"
#include "device/device.h"
#include "policy/policy.h"

namespace halfwire {

// One call to compress. `count` is as passed to NCCL (per rank for ReduceScatter, AllGather, AlltoAll, Gather
// and Scatter).
struct CompressedCall {
  CollectiveOp op = CollectiveOp::kAllReduce;  // any but kSend and kRecv
  const void* send = nullptr;
  void* recv = nullptr;
  uint64_t count = 0;
  DataType type = DataType::kBf16;
  bool average = false;
  Factor factor;
  StreamHandle stream = nullptr;
  uint32_t root = 0;  // of Reduce, Broadcast, Gather and Scatter
};

struct CallStats {
  uint64_t sent_bytes = 0;  // payload of this rank's packets, every peer counted
  uint32_t launches = 0;    // codec kernels
};

// Brackets real NCCL calls. `enter` is called before each and may refuse (the communicator is being aborted);
// `leave` after each. Implemented by the interposer, and by tests.
class CallGate {
 public:
  virtual ~CallGate() = default;
  virtual bool enter() = 0;
  virtual void leave() = 0;
};

struct CompressedTurn;

// The scratch and the plan of one communicator. Used by one thread at a time, as its communicator is.
class Compressor {
 public:
  struct Config {
    ncclComm_t comm = nullptr;
    uint32_t rank = 0;
    uint32_t ranks = 0;
    WireFormat format;
    uint64_t chunk_bytes = 64ull << 20;  // of the user's buffer, that the scratch holds at a time
    bool overlap = false;                // equal on all ranks
    bool noise = false;                  // nothing is compressed: exact collectives, then Device::perturb
    bool stochastic = false;             // rounding, but in captured calls: a replay would repeat its bits
    uint64_t seed = 0;                   // of noise and rounding, equal on all ranks
    uint64_t number = 0;                 // of the communicator in its process: rounding differs between them
  };

  // Allocates the scratch; nothing is allocated later. `api` and `device` must outlive the compressor.
  static Result<std::unique_ptr<Compressor>> create(const NcclApi* api, Device* device, const Config& config);

  // Waits for the scratch's last use, then frees it.
  ~Compressor();
  Compressor(const Compressor&) = delete;
  Compressor& operator=(const Compressor&) = delete;

  // Gives up the scratch without touching the device: for communicators that were aborted, whose kernels may
  // hang. May be called while another thread is inside runCompressed.
  void park();

  static uint64_t scratchBytes(const Config& config);

  // Takes a scratch for smaller chunks instead, where the ranks agree so after the compressor was made.
  // Before the first call. The larger scratch stays if there is no memory for the smaller one beside it.
  void useChunks(uint64_t chunk_bytes);

  // Takes another format from the next call on, on all ranks alike. Its packets must be no larger than those
  // of the format the compressor was made with.
  void useFormat(const WireFormat& format) { config_.format = format; }
  const Config& config() const { return config_; }
  // Bytes of scratch this compressor holds.
  uint64_t scratchHeld() const { return scratch_held_; }

  // A call's share of one pass through the scratch.
  struct Piece {
    uint32_t call = 0;
    uint64_t offset = 0;    // elements from the start of the buffer or of each rank's part
    uint64_t elements = 0;  // of the buffer, or of each rank's part
    uint64_t shard = 0;     // elements of a packet; the last packets of a sum of shards may hold fewer
    uint64_t packet = 0;    // bytes from one packet to the next
    uint64_t outgoing = 0;  // scratch offset of the packets to send; unused by gathers
    uint64_t incoming = 0;  // scratch offset of the packets received
    uint64_t number = 0;    // of the call on its communicator; 0 where it rounds to nearest
  };

 private:
  friend class Schedule;
  friend ncclResult_t connectPeers(std::span<Compressor* const> members, CallGate& gate, std::string* error);

  Compressor() = default;
  bool oneShot(const CompressedCall& call) const;
  bool atRoot(const CompressedCall& call) const { return call.root == config_.rank; }
  uint64_t bytesOf(const CompressedCall& call, uint64_t elements) const;
  uint64_t passBytes(uint64_t message) const;
  bool overlaps(const CompressedCall& call) const;
  std::vector<std::vector<Piece>> plan(std::span<const CompressedCall> calls) const;
  uint64_t shardLength(const Piece& piece, uint32_t shard) const;
  Rounding rounding(const Piece& piece, uint32_t phase) const;
  Status quantize(const CompressedCall& call, const Piece& piece, StreamHandle stream);
  Status reduce(const CompressedCall& call, const Piece& piece, StreamHandle stream);
  Status finish(const CompressedCall& call, const Piece& piece, StreamHandle stream);
  ncclResult_t exchange(const CompressedCall& call, const Piece& piece, StreamHandle stream,
                        CallStats* stats);
  ncclResult_t gather(const CompressedCall& call, const Piece& piece, StreamHandle stream, CallStats* stats);
  ncclResult_t moveAtRoot(const CompressedCall& call, const Piece& piece, StreamHandle stream,
                          CallStats* stats);

  const NcclApi* api_ = nullptr;
  Device* device_ = nullptr;
  Config config_;
  char* scratch_ = nullptr;
  uint64_t scratch_held_ = 0;
  ScratchOrder order_;
  uint64_t noised_ = 0;               // calls so far: with the seed, what makes the noise equal on all ranks
  uint64_t calls_ = 0;                // so far, of those that round stochastically
  std::atomic<bool> parked_{false};   // set by the thread that aborts, perhaps while another one is enqueuing
  StreamHandle transfers_ = nullptr;  // of our own, where passes overlap
  EventHandle ready_ = nullptr;       // what is to be moved next is in the scratch
  EventHandle moved_ = nullptr;
};

// The compressed calls of one communicator in one group, or a single call. `streams` are further streams of
// the group that must be ordered before and after (the calls' own streams need not be listed).
struct CompressedTurn {
  Compressor* compressor = nullptr;
  std::span<const CompressedCall> calls;
  std::span<const StreamHandle> streams;
  std::vector<CallStats> stats;  // one a call, filled in
};

// Runs the turns of communicators that are members of one clique in this process (one turn for most programs)
// in shared phases: all quantize, one real group of sends and receives, all reduce, one real group of
// gathers, all finish. The codec is enqueued in order on each turn's first call's stream, and so are the
// transfers unless passes overlap; other streams fork and join by events. Compressors of noise run one real
// group of exact reductions and then perturb each result. On failure returns NCCL's result and says why in
// `error`.
ncclResult_t runCompressed(std::span<CompressedTurn> turns, CallGate& gate, std::string* error);

// Makes every connection that compressed calls will use, by moving packets of scratch nobody reads. NCCL
// connects a pair at its first message: that allocates memory and blocks the host, so it belongs to the
// making of the communicator. Collective over the communicators of `members`, of which one thread may hold
// several. Blocks until done.
ncclResult_t connectPeers(std::span<Compressor* const> members, CallGate& gate, std::string* error);

}  // namespace halfwire
