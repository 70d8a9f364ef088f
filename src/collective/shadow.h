// The shadow of a communicator: the program's collectives stay exact, and sampled ones run a second time,
// compressed, on copies of their buffers and on a stream of our own, to be compared with what the program
// got. A user learns what compression would do to the numbers and how long it would take before it does
// anything.
//
// All ranks must issue the same extra collectives in the same order: a call is sampled by its number among
// the communicator's calls that the policy would compress and by its size, never by step, time or memory.
// They run behind the exact call on a stream of their own, so that no stream of the program ever waits for
// them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/compressor.h"

namespace halfwire {

// What one sampled call gave.
struct ShadowSample {
  CollectiveOp op = CollectiveOp::kAllReduce;
  DataType type = DataType::kBf16;
  uint64_t count = 0;  // as passed to NCCL
  WireFormat format;
  ErrorSums sums;
  double exact_ms = 0;       // from the program's stream reaching the exact call to its end
  double compressed_ms = 0;  // of the compressed run
};

// Used by one thread at a time, as its communicator is.
class Shadow {
 public:
  struct Config {
    Compressor::Config compressor;    // its format is the first of `formats`
    std::vector<WireFormat> formats;  // samples take them in an order without a period
    uint64_t bytes = 0;  // of messages sampled between two ends of a group; larger messages are not sampled
    uint32_t every = 1;  // one call in so many
  };

  // Allocates everything; nothing is allocated later. `api` and `device` must outlive the shadow.
  static Result<std::unique_ptr<Shadow>> create(const NcclApi* api, Device* device, const Config& config);
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

  // As Compressor::park.
  void park();

  // Bytes of device memory this shadow holds.
  uint64_t scratchHeld() const;
  Compressor& compressor() { return *compressor_; }

  // Counts a call that the policy would compress; whether it is sampled.
  bool samples(const CompressedCall& call);

  // Before a sampled call is handed to NCCL: keeps its input. Between this and runShadows the call's buffers
  // must not be touched by anything but the call. Fails if the samples of one group exceed the buffers.
  Status keep(const CompressedCall& call);
  // Forgets what was kept since the last runShadows: the group failed.
  void drop();

  // Samples that are done, in order; each is given once. Never waits.
  std::vector<ShadowSample> collect();
  // The same after waiting for all of them.
  std::vector<ShadowSample> finish();
  // Samples for which no record was free: they ran, and nobody read them.
  uint64_t unread() const { return unread_; }

 private:
  friend ncclResult_t runShadows(std::span<Shadow* const> members, CallGate& gate, std::string* error);

  // Where a sample is read from: events, and sums that the host sees.
  struct Record {
    EventHandle exact[2] = {};
    EventHandle compressed[2] = {};
    EventHandle read = nullptr;
    ErrorSums* sums = nullptr;
    ShadowSample sample;
  };
  struct Kept {
    CompressedCall call;
    uint64_t in = 0;  // offsets into the buffers
    uint64_t out = 0;
    WireFormat format;
    Record* record = nullptr;  // null where none was free
  };

  Shadow() = default;
  uint64_t inputBytes(const CompressedCall& call) const;
  uint64_t outputElements(const CompressedCall& call) const;
  Status closeExact(Kept& kept);
  CompressedCall copied(const Kept& kept) const;
  ncclResult_t meet();
  Status openCompressed(Kept& kept);
  Status compareWith(Kept& kept);
  bool read(Record& record);

  const NcclApi* api_ = nullptr;
  Device* device_ = nullptr;
  Config config_;
  std::unique_ptr<Compressor> compressor_;
  char* input_ =
      nullptr;  // copies of what went in, of what the program got, and what the compressed run made
  char* exact_ = nullptr;
  char* compressed_ = nullptr;
  ErrorSums* sums_ = nullptr;  // device memory
  char* meeting_ = nullptr;    // where the ranks meet before a compressed run
  StreamHandle stream_ = nullptr;
  EventHandle kept_event_ = nullptr;
  EventHandle done_ = nullptr;  // the buffers are free
  bool used_ = false;
  bool parked_ = false;
  uint64_t number_ = 0;   // of the next call
  uint64_t sampled_ = 0;  // so far
  uint64_t input_used_ = 0;
  uint64_t output_used_ = 0;
  std::vector<Kept> pending_;
  std::vector<std::unique_ptr<Record>> records_;
  std::vector<Record*> free_;
  std::vector<Record*> outstanding_;
  uint64_t unread_ = 0;
};

// Runs what the members of one clique in this process have kept, compressed, once the exact calls are
// enqueued. On failure returns NCCL's result and says why in `error`.
ncclResult_t runShadows(std::span<Shadow* const> members, CallGate& gate, std::string* error);

}  // namespace halfwire
