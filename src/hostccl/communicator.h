// One rank of one communicator: its links, its operators, and the order of its work on the streams.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi/cuda_runtime.h"
#include "hostccl/collectives.h"
#include "hostccl/mesh.h"
#include "hostccl/service.h"

namespace halfwire::hostccl {

// Work of one group on one communicator.
struct Batch {
  std::vector<CollectiveCall> collectives;
  std::vector<PointToPoint> messages;
  std::vector<cudaStream_t> streams;  // in order of first use
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size, int device, bool blocking)
      : rank_(rank), size_(size), device_(device), blocking_(blocking) {}
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  // Whether calls return when they are done, or at once (ncclConfig_t's `blocking`).
  bool blocking() const { return blocking_; }
  // Whether connect() has succeeded.
  bool connected() const { return connected_; }
  uint64_t number() const { return number_; }

  // Collective: blocks until all members are there.
  Outcome connect(const Identity& identity);
  // Collective over this communicator; `child` (null for no colour) gets its rank, size and links.
  Outcome split(int color, int key, bool blocking, std::shared_ptr<Communicator>* child);

  // Queues a batch behind everything queued before on this communicator, whatever the streams. launchMessages
  // is the second half: NCCL runs a group's collectives before its point-to-point calls.
  Outcome join(const Batch& batch);
  Outcome launchCollectives(const Batch& batch);
  Outcome launchMessages(const Batch& batch);
  Outcome fork(const Batch& batch);

  Outcome createOperator(const Reduction& reduction, ncclDataType_t type, ncclRedOp_t* op);
  Outcome destroyOperator(ncclRedOp_t op);
  // The operator behind `op` for elements of `type`.
  Outcome findOperator(ncclRedOp_t op, ncclDataType_t type, Reduction* out);

  // Waits for queued work, then takes leave of the peers. Later calls find the communicator finalized.
  void finalize();
  // Ends everything now, from any thread, and waits for calls in progress to notice.
  void abort();
  bool finalized() const { return finalized_; }

  // Around a call that goes on after it returned or that another thread may abort: in between, asyncError()
  // is ncclInProgress. An outcome that is an error stays.
  void begin();
  void finish(const Outcome& outcome);
  Outcome asyncError();

 private:
  struct Operator {
    bool used = false;
    ncclDataType_t type = ncclInt8;
    Reduction reduction;
  };
  struct Job;

  Outcome meet(const Token& token, uint64_t number, const std::vector<Member>& members, const Cancel& cancel);
  Outcome launch(cudaStream_t stream, std::vector<CollectiveCall> collectives,
                 std::vector<PointToPoint> messages);

  const int rank_;
  const int size_;
  const int device_;
  const bool blocking_;
  uint64_t number_ = 0;
  Token token_{};
  Service* service_ = nullptr;
  std::vector<Member> members_;
  Cancel cancelled_{false};
  std::atomic<bool> finalized_{false};
  std::atomic<bool> connected_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  std::shared_ptr<Mesh> mesh_;
  cudaEvent_t tail_ = nullptr;  // behind the last piece of work of this communicator
  uint64_t sequence_ = 0;
  uint64_t splits_ = 0;
  int queued_ = 0;       // host functions not finished
  int in_progress_ = 0;  // calls begun and not finished
  Outcome failure_;      // of a call that went on after it returned
  std::vector<Operator> operators_;
};

// Runs `body` with this thread's device set to `device`.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();

 private:
  int old_ = 0;
};

}  // namespace halfwire::hostccl
