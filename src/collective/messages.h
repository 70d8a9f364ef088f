// Compressed sends and receives of one communicator: a packet a message, whole, so that nothing has to be
// agreed with the other end but the message itself. All messages of a group are in flight together, as in
// NCCL, which lets a rank send while it receives; their packets need scratch together, which grows to what a
// group needs and no further than a limit.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/compressor.h"
#include "collective/nccl_api.h"
#include "collective/scratch_order.h"

namespace halfwire {

// One send or receive of a turn, or (`exact`) any call that NCCL runs among them and that stays as it is.
struct Message {
  bool send = false;
  void* buffer = nullptr;  // read if it sends
  uint64_t count = 0;
  DataType type = DataType::kBf16;
  int peer = 0;
  StreamHandle stream = nullptr;
  std::function<ncclResult_t()> exact;  // if set: issues the call; the rest but `stream` is not looked at
};

// The scratch of one communicator's messages. Used by one thread at a time.
class Messages {
 public:
  struct Config {
    ncclComm_t comm = nullptr;
    WireFormat format;
    uint64_t limit_bytes = 256ull << 20;  // of packets in flight in one turn
    bool stochastic = false;              // this and the rest as of Compressor::Config
    uint64_t seed = 0;
    uint64_t number = 0;
    uint32_t rank = 0;
  };

  // Takes no scratch before the first message. `api` and `device` must outlive it.
  static Result<std::unique_ptr<Messages>> create(const NcclApi* api, Device* device, const Config& config);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Takes another limit from the next turn on.
  void useLimit(uint64_t bytes) { config_.limit_bytes = bytes; }

  // Gives everything up without touching the device, as Compressor::park.
  void park() { parked_ = true; }
  uint64_t scratchHeld() const { return held_; }

  // A turn of one communicator. `streams` are further ones to be ordered before and after.
  struct Turn {
    Messages* messages = nullptr;
    std::span<const Message> calls;
    std::span<const StreamHandle> streams;
    std::vector<CallStats> stats;  // one a call, filled in
  };

  // Runs the turns of communicators of one clique: quantizes what is sent, one real group of all calls in
  // their order, dequantizes what came. kInvalidArgument's result and a sentence with the cure where a turn
  // needs more than the limit.
  static ncclResult_t run(std::span<Turn> turns, CallGate& gate, std::string* error);

 private:
  Messages() = default;
  uint64_t packetsOf(const Message& m) const;
  Status reserve(uint64_t bytes);

  const NcclApi* api_ = nullptr;
  Device* device_ = nullptr;
  Config config_;
  ScratchOrder order_;
  char* scratch_ = nullptr;
  uint64_t size_ = 0;
  uint64_t held_ = 0;  // with what earlier turns may still use
  std::vector<void*> outgrown_;
  uint64_t calls_ = 0;  // sends so far, of those that round stochastically
  std::atomic<bool> parked_{false};
};

}  // namespace halfwire
