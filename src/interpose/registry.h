// The interposer's one registry: the process's settings, the real NCCL, its communicators and its run log. It
// is made at the first ncclGetUniqueId or communicator and lives until the process ends: nothing runs at load
// or at exit.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/compressor.h"
#include "collective/messages.h"
#include "collective/shadow.h"
#include "interpose/meeting.h"
#include "interpose/resolver.h"
#include "meter/hooks.h"
#include "policy/policy.h"
#include "policy/run_log.h"

namespace halfwire {

// Where a thread is inside a communicator's compressed call. Abort reads it from another thread.
enum class CallState : int { kIdle, kOurs, kReal };

// A PreMulSum operator the program created.
struct CreatedOp {
  ncclRedOp_t op;
  ncclDataType_t type;
  Factor factor;
};

struct Communicator {
  const RealNccl* real = nullptr;
  ncclComm_t handle = nullptr;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  Agreement agreement;
  bool blocking = true;
  std::optional<Mark> mark;  // of the id it descends from
  uint64_t branch = 0;       // see MemberRecord
  uint32_t splits = 0;       // Split calls so far: equal on all ranks
  uint64_t clique = 0;       // equal for members of one communicator
  std::shared_ptr<Device> device;
  // One of the two is set if and only if agreement.comm is kCompressed.
  std::unique_ptr<Compressor> compressor;
  std::unique_ptr<Shadow> shadow;
  std::unique_ptr<Messages> messages;  // beside a compressor, where Sends and Recvs may be compressed
  RunLogCommunicator* log = nullptr;
  RunLogRow* last_row = nullptr;  // of its log

  std::atomic<CallState> state{CallState::kIdle};
  std::atomic<bool> aborted{false};

  std::mutex ops_mutex;
  std::vector<CreatedOp> ops;

  bool compresses() const { return compressor != nullptr; }
};

class Registry {
 public:
  // The process's registry; made on first use, never destroyed.
  static Registry& get();

  // What the environment asks for, or why it is not valid.
  const Result<Settings>& settings() const { return settings_; }

  // The real NCCL, found on first use. Null and a status when there is none.
  const RealNccl* real(Status* status);

  // The same if it has been found already, else null. Lock-free, and makes no registry.
  static const RealNccl* realIfFound() { return real_ready_.load(std::memory_order_acquire); }

  // Another copy of NCCL in this process that `caller` belongs to: its calls to itself must stay in it. Null
  // where `caller` is not in such a library.
  const RealNccl* otherCopy(const void* caller);

  // Waits until the verdict that this process is sending has reached every member's connection: the process
  // that made the id may end as soon as it knows its own.
  void settleMeetings();

  // A mark for a new id: opens the meeting point on first use.
  Result<Mark> invite();

  // Lock-free. Null for a handle that is not followed.
  Communicator* find(ncclComm_t handle) const;

  // Takes ownership and enters it into the run log.
  void add(std::unique_ptr<Communicator> communicator, const std::string& note, uint64_t connection_bytes);

  // Takes a handle out and returns its state; null if it is not followed.
  std::unique_ptr<Communicator> remove(ncclComm_t handle);

  // Keeps state that can no longer be freed safely (an aborted communicator) until the process ends.
  void park(std::unique_ptr<Communicator> communicator);

  // The device of a communicator: its kernels are loaded once however many communicators use it.
  Result<std::shared_ptr<Device>> device(const RealNccl& real, int ordinal);

  // Takes scratch from the program's allocator from now on; false once a device has been made.
  bool setAllocator(const AllocatorCalls& calls);

  // Notes an error of ours for the report.
  void noteError(const std::string& words);

  // The exposure meter once it has started, else null.
  const meter::MeterHooks* meter() const { return meter_.load(std::memory_order_relaxed); }

  // The run log may be written: false in a forked child, whose counters would be its parent's.
  bool counting() const { return counting_.load(std::memory_order_relaxed); }
  void stopCounting() {
    counting_.store(false, std::memory_order_relaxed);
    meter_.store(nullptr, std::memory_order_relaxed);
  }

  uint64_t nextClique() { return cliques_.fetch_add(1, std::memory_order_relaxed); }
  // Of a communicator in the order of their making: the same in every run of a program that makes them in
  // order.
  uint64_t nextNumber() { return numbers_.fetch_add(1, std::memory_order_relaxed); }

 private:
  Registry();
  RunLog* log();
  void startMeter(RunLogFile& file);

  struct Slot {
    std::atomic<ncclComm_t> key{nullptr};
    std::atomic<Communicator*> value{nullptr};
  };
  static constexpr size_t kSlots = 4096;
  static size_t slotOf(ncclComm_t handle);

  Result<Settings> settings_;
  std::mutex mutex_;
  std::optional<Result<RealNccl>> real_;
  static constinit inline std::atomic<const RealNccl*> real_ready_{nullptr};
  std::map<const void*, std::unique_ptr<RealNccl>> other_copies_;  // by load address
  std::unique_ptr<MeetingPoint> meeting_;
  int meeting_pid_ = 0;
  RunLog* log_ = nullptr;  // processLog's
  bool log_tried_ = false;
  std::atomic<const meter::MeterHooks*> meter_{nullptr};
  std::vector<std::unique_ptr<Communicator>> parked_;
  std::mutex devices_mutex_;
  AllocatorCalls allocator_;
  std::map<std::pair<const RealNccl*, int>, std::weak_ptr<Device>> devices_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> cliques_{1};
  std::atomic<uint64_t> numbers_{0};
  std::atomic<bool> counting_{true};
};

}  // namespace halfwire
