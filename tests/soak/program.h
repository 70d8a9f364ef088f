// A random, legal NCCL program: the same seed gives the same program everywhere.
//
// Why every program ends: its steps have one global order, and each rank enqueues its part of them in that
// order. In a step, a rank that groups its calls and one that does not agree because NCCL runs a group
// communicator by communicator in order of first call, collectives before point-to-point; a rank that does
// not group calls in just this order. The earliest unfinished call in the global order always finds its peers
// ready.
//
// AlltoAll, Gather and Scatter count as messages: NCCL makes them of sends and receives.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "abi/nccl.h"
#include "soak/values.h"
#include "wire/format.h"

namespace halfwire::soak {

enum class OpKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAlltoAll,
  kGather,
  kScatter,
  kSendRecv
};
// Made of sends and receives.
constexpr bool isExchange(OpKind kind) {
  return kind == OpKind::kAlltoAll || kind == OpKind::kGather || kind == OpKind::kScatter;
}
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}
enum class RedOp : uint8_t { kSum, kAvg, kPreMul, kMax, kMin };

const char* opKindName(OpKind kind);

// One rank's own part of an operation: nothing here has to be equal on all ranks.
struct Placement {
  int stream = 0;
  bool in_place = false;
  uint32_t send_offset = 0;  // elements after an aligned address
  uint32_t recv_offset = 0;
  bool device_scalar = false;  // PreMulSum's scalar is read from device memory
  bool null_send = false;      // Broadcast and Scatter, not the root: no send buffer
  bool null_recv = false;      // Reduce and Gather, not the root: no receive buffer
  bool old_name = false;       // Broadcast in place: by ncclBcast
};

struct Op {
  int id = 0;
  OpKind kind = OpKind::kAllReduce;
  int comm = 0;
  ncclDataType_t type = ncclFloat32;
  RedOp redop = RedOp::kSum;
  uint64_t count = 0;  // as passed to NCCL
  int root = 0;        // or the sender of kSendRecv
  int peer = 0;        // the receiver of kSendRecv
  Profile profile = Profile::kNormal;
  std::vector<double> scalars;        // PreMulSum, by rank of the communicator, exact in `type`
  std::vector<Placement> placements;  // by rank of the communicator
};

enum class CommHow : uint8_t { kId, kSplit };

struct Comm {
  std::vector<int> members;  // ranks of the job in the communicator's order
  int creation = 0;
  bool blocking = true;
};

// What ncclConfig_t says of blocking; without one an id's communicator blocks and a split's is as its parent.
enum class Config : uint8_t { kNone, kBlocking, kNonBlocking };

// One creation makes one communicator (by an id) or several (a split with several colours).
struct Creation {
  CommHow how = CommHow::kId;
  Config config = Config::kNone;
  std::vector<int> comms;
  std::vector<int> color;  // split, by rank of the job; NCCL_SPLIT_NOCOLOR for none
  std::vector<int> key;
};

// What one rank of the job does in a step.
struct RankStep {
  bool grouped = false;
  int nesting = 1;          // GroupStart calls around it
  int inner_at = -1;        // a nested pair of GroupStart and GroupEnd around the call at this position
  std::vector<int> order;   // indices of ops; kSendRecv ops of this rank appear as send, receive or both
  std::vector<bool> sends;  // for kSendRecv, by position: this is the send
  int delay_us = 0;         // host delay before the step
  int sync = 0;  // after the step: 0 nothing, 1 one stream, 2 all streams, 3 another stream waits by an event
  int sync_stream = 0;
  int wait_stream = 0;
};

struct Step {
  std::vector<RankStep> ranks;
};

struct Program {
  uint64_t seed = 0;
  int ranks = 2;
  int streams = 1;
  std::map<std::string, std::string> settings;  // HALFWIRE_* variables
  bool create_grouped = false;
  std::vector<Creation> creations;
  std::vector<Comm> comms;
  std::vector<Op> ops;
  std::vector<Step> steps;
  // How the program ends where a rank of it is to be killed or to abort.
  int victim = 0;
  bool aborts = false;  // where either may be
  int end_step = 0;     // the victim kills itself, or its second thread aborts, at this step ...
  bool end_after_call = false;
  bool end_timed = false;  // ... or after a time, and is then killed from outside
  double end_after_s = 0;
  int abort_after_us = 0;          // from the step on
  std::vector<int> abort_order;    // of the communicators
  std::vector<bool> has_watchdog;  // by rank: a second thread looks for errors, the first one blocks

  int rankIn(int comm, int job_rank) const;  // -1 if it is not a member
};

struct GenerateOptions {
  int ranks = 0;  // 0: any of 2 to 5
  // Where NCCL allows it, exchanges that are compressed may come in another order on another rank. The
  // library asks for more: see ordersAsMessage.
  bool any_order = false;
};

Program generateProgram(uint64_t seed, const GenerateOptions& options);

// The program as text, one line a call.
std::string describeProgram(const Program& program);
std::string describeOp(const Program& program, const Op& op);

// Elements of the buffer a member sends from and receives into.
uint64_t sendElements(const Program& program, const Op& op, int comm_rank);
uint64_t recvElements(const Program& program, const Op& op, int comm_rank);

// Whether the operation is a message from one rank of its communicator to another, or made of such.
bool sendsBetween(const Op& op, int from, int to);

WireFormat wireFormat(const Program& program);
bool stochastic(const Program& program);  // rounding
uint64_t chunkBytes(const Program& program);

// Whether a group may move it about as a message. Compressed exchanges are of several steps and run before
// the group's messages, so all ranks have to make them as they make collectives: in one order, and several of
// them all in a group or none.
bool ordersAsMessage(const Program& program, const Op& op, const GenerateOptions& options);

// Whether these settings ask for this call to be compressed. Looks at its communicator, kind, type, count and
// operator.
bool shouldCompress(const Program& program, const Op& op);

// The key of the data that a member sends.
inline uint64_t dataKey(const Program& program, const Op& op, int comm_rank);

}  // namespace halfwire::soak

#include "soak/random.h"

inline uint64_t halfwire::soak::dataKey(const Program& program, const Op& op, int comm_rank) {
  return mix(mix(program.seed, static_cast<uint64_t>(op.id)), static_cast<uint64_t>(comm_rank));
}
