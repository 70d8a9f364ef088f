// Which calls are compressed, and the words that say why. A decision is a pure function of values that are
// equal on all ranks: the record agreed when the communicator was made, and the call's operation, type,
// count, reduction operator and capture state.
#pragma once

#include <cstdint>

#include "abi/nccl.h"
#include "policy/settings.h"

namespace halfwire {

enum class CollectiveOp : uint8_t {
  kAllReduce = 0,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAlltoAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kCount
};

// Why a call is compressed or not. Values are stored in run logs: append only.
enum class Reason : uint8_t {
  kCompressed = 0,
  kModeOff,            // Halfwire is switched off
  kOneRank,            // the communicator has one rank
  kCommNotSelected,    // --comms does not select it
  kJobSizeUnknown,     // --comms world, but no launcher said how many ranks the job has
  kNonBlocking,        // a member is non-blocking
  kMemberNotReady,     // a member could not allocate scratch or load kernels
  kCreatedOutside,     // made in a way that is not followed (Shrink, an id from elsewhere)
  kTooManyRanks,       // more ranks than a flat all-to-all should connect
  kOneConnection,      // CUDA_DEVICE_MAX_CONNECTIONS=1
  kOpNotAsked,         // --ops does not name the operation
  kOpNotSupported,     // this operation is never compressed
  kTypeNotSupported,   // integers, fp64, fp8
  kRedOpNotSupported,  // max, min, prod
  kBelowFloor,         // smaller than --min-bytes
  kEmpty,              // no elements
  kCapturing,          // being captured into a graph
  kFp32Moved,          // fp32 that is moved, not summed: needs --ops NAME-fp32
  kNoise,              // exact, with noise added to the result
  kShadow,             // exact; would be compressed
  kMessageTooLarge,    // a Send or Recv whose packet the scratch of messages could not hold
  kCount
};

// One sentence for people: "smaller than --min-bytes".
const char* reasonText(Reason reason);
const char* opName(CollectiveOp op);            // "AllReduce"
const char* dataTypeName(ncclDataType_t type);  // "bf16"

// What goes by the link between the ranks where the user names no value. The floor is the message size from
// which compression pays: below, the codec and its launches cost more than the bytes saved. Chunks are larger
// over NVLink, where cutting a message costs its packets more than it costs slower links. Measured in
// docs/benchmarks.md and docs/benchmarks-two-gpus.md.
struct LinkDefaults {
  uint64_t floor_bytes;
  uint64_t chunk_bytes;
};
inline constexpr LinkDefaults kOtherLink{4ull << 20, 64ull << 20};
inline constexpr LinkDefaults kNvlink{64ull << 20, 256ull << 20};

// The user's values, or those of the link: `nvlink` where NVLink joins all ranks.
LinkDefaults linkDefaults(const Settings& settings, bool nvlink);

// What all ranks of a communicator agreed on when it was made.
struct Agreement {
  Settings settings;
  uint32_t ranks = 0;
  Reason comm = Reason::kModeOff;                 // kCompressed if the communicator compresses at all
  uint64_t floor_bytes = kOtherLink.floor_bytes;  // smaller messages stay exact
  uint64_t chunk_bytes = kOtherLink.chunk_bytes;
};

// The reduction operator's class; created operators are PreMulSum.
enum class RedOpKind : uint8_t { kNone, kSum, kAvg, kPreMulSum, kOther };

struct CallShape {
  CollectiveOp op = CollectiveOp::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  RedOpKind redop = RedOpKind::kNone;
  uint64_t count = 0;  // as passed to NCCL
  bool capturing = false;
};

// Largest number of ranks for which packets go straight to every peer.
inline constexpr uint32_t kMaxFlatRanks = 32;

// Whether a communicator compresses, from values every member knows before they meet.
Reason decideCommunicator(const Settings& settings, uint32_t ranks);

// Bytes of packets of Sends and Recvs that may be in flight in one group. Larger messages than a chunk stay
// exact: both ends know that from what was agreed.
uint64_t messageScratchLimit(uint64_t chunk_bytes);

// Whether an operation sums: the others move data.
bool reducesData(CollectiveOp op);

Reason decideCall(const Agreement& agreement, const CallShape& call);

// Bytes of the whole message: AllReduce's buffer, all parts of ReduceScatter, AllGather and AlltoAll.
uint64_t messageBytes(CollectiveOp op, ncclDataType_t type, uint64_t count, uint32_t ranks);

// Bytes that one rank sends if the call runs as an exact ring (Patarasuk and Yuan 2009): 2 (W-1)/W of the
// buffer for AllReduce, (W-1)/W of the message for ReduceScatter, AllGather and AlltoAll, the message for the
// rest (0 for Recv).
uint64_t ringBytes(CollectiveOp op, ncclDataType_t type, uint64_t count, uint32_t ranks);

// True and the wire's type if `type` can be compressed.
bool wireDataType(ncclDataType_t type, DataType* out);

// The other way round.
ncclDataType_t ncclDataType(DataType type);

}  // namespace halfwire
