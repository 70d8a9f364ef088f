// What one thread is doing: whether it is inside the real NCCL, how deep in groups, and what its group has
// queued.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "interpose/registry.h"
#include "meter/hooks.h"

namespace halfwire {

// One data call, enough to issue it later.
struct QueuedCall {
  CollectiveOp op = CollectiveOp::kAllReduce;
  bool bcast = false;  // ncclBcast rather than ncclBroadcast
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t redop = ncclSum;
  int peer = 0;  // root, or the other end
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

// Issues the call to the real library, unchanged.
ncclResult_t issue(const NcclApi& api, const QueuedCall& call);

// Where a call is counted; either may be null.
struct CountedRows {
  RunLogRow* kind = nullptr;
  RunLogSize* size = nullptr;  // only while the meter is on
};

// A call that NCCL runs behind a group's collectives.
struct PointToPoint {
  QueuedCall call;
  bool compressed = false;  // a Send or Recv
  CountedRows rows;
};

// A communicator's part of a group: what runs at its turn when the outermost group ends.
struct MemberTurn {
  Communicator* communicator = nullptr;
  std::vector<QueuedCall> forwarded;  // collectives that are not compressed
  std::vector<CompressedCall> compressed;
  std::vector<CountedRows> rows;  // of the compressed calls
  std::vector<PointToPoint> p2p;
};

// Communicators of this process that are members of one clique take their turn together, as in NCCL.
struct CliqueTurn {
  uint64_t clique = 0;
  std::vector<MemberTurn> members;
};

// A communicator whose initialisation was started and that has not met its peers yet.
struct NewCommunicator {
  ncclComm_t* out = nullptr;
  const RealNccl* real = nullptr;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  bool blocking = true;
  bool followed = true;  // false: made in a way whose peers cannot be met
  uint64_t number = 0;   // in the order of making
  bool local = false;    // all its ranks are in this process and in this list
  std::optional<Mark> mark;
  uint64_t branch = 0;
  uint64_t clique = 0;
};

struct DestroyedOp {
  const RealNccl* real = nullptr;
  ncclRedOp_t op = ncclSum;
  ncclComm_t comm = nullptr;
};

// The slow part of a thread's state, made when a group first needs it.
struct GroupQueue {
  std::vector<CliqueTurn> turns;
  std::vector<Communicator*>
      passed;  // communicators whose calls went to the open group before any turn was queued
  std::vector<NewCommunicator> inits;
  std::vector<DestroyedOp> destroyed_ops;
  std::vector<meter::MeterCall> metered;  // the group's calls, for the meter
  std::vector<Communicator*> shadowed;    // with calls that are sampled

  void clear() {
    turns.clear();
    passed.clear();
  }
};

struct ThreadState {
  int inside_real = 0;  // depth of calls into the real NCCL made by us on this thread
  int group_depth = 0;
  const RealNccl* group_real = nullptr;  // the library whose group is open
  GroupQueue* queue = nullptr;
  const char* last_error = nullptr;  // ours; null if the last failure was NCCL's
};

ThreadState& threadState();

// The thread's queue, made on first use and freed when the thread ends.
GroupQueue& threadQueue();

// Records `words` as the thread's last error and in the report; returns `result`.
ncclResult_t refuse(ncclResult_t result, const std::string& words);

// Marks this thread as inside the real NCCL, which calls its own public functions.
class InsideReal {
 public:
  InsideReal() { ++threadState().inside_real; }
  ~InsideReal() { --threadState().inside_real; }
  InsideReal(const InsideReal&) = delete;
  InsideReal& operator=(const InsideReal&) = delete;
};

}  // namespace halfwire
