#include "policy/policy.h"

#include "abi/nccl_types.h"

namespace halfwire {
namespace {

bool asked(const Settings& s, OpBit bit) { return (s.ops & static_cast<uint32_t>(bit)) != 0; }

// What --ops must name for an operation, and for its fp32 where that is not included.
struct Wish {
  OpBit half;
  OpBit fp32;
};
bool wishOf(CollectiveOp op, Wish* wish) {
  switch (op) {
    case CollectiveOp::kAllReduce:
      return *wish = {OpBit::kAllReduce, OpBit::kAllReduce}, true;
    case CollectiveOp::kReduceScatter:
      return *wish = {OpBit::kReduceScatter, OpBit::kReduceScatter}, true;
    case CollectiveOp::kReduce:
      return *wish = {OpBit::kReduce, OpBit::kReduce}, true;
    case CollectiveOp::kAllGather:
      return *wish = {OpBit::kAllGather, OpBit::kAllGatherFp32}, true;
    case CollectiveOp::kBroadcast:
      return *wish = {OpBit::kBroadcast, OpBit::kBroadcastFp32}, true;
    case CollectiveOp::kAlltoAll:
      return *wish = {OpBit::kAlltoAll, OpBit::kAlltoAllFp32}, true;
    case CollectiveOp::kGather:
      return *wish = {OpBit::kGather, OpBit::kGatherFp32}, true;
    case CollectiveOp::kScatter:
      return *wish = {OpBit::kScatter, OpBit::kScatterFp32}, true;
    case CollectiveOp::kSend:
    case CollectiveOp::kRecv:
      return *wish = {OpBit::kSendRecv, OpBit::kSendRecvFp32}, true;
    default:
      return false;
  }
}

}  // namespace

const char* reasonText(Reason reason) {
  switch (reason) {
    case Reason::kCompressed:
      return "compressed";
    case Reason::kModeOff:
      return "Halfwire is off (--mode off)";
    case Reason::kOneRank:
      return "the communicator has one rank";
    case Reason::kCommNotSelected:
      return "not a communicator that --comms selects";
    case Reason::kJobSizeUnknown:
      return "--comms world, but WORLD_SIZE is not set: use --comms all or size:N";
    case Reason::kNonBlocking:
      return "a member's communicator is non-blocking";
    case Reason::kMemberNotReady:
      return "a member could not get its scratch memory or load the kernels";
    case Reason::kCreatedOutside:
      return "made in a way that is not followed (shrink, or an id from elsewhere)";
    case Reason::kTooManyRanks:
      return "more than 32 ranks: a flat all-to-all would connect too many pairs";
    case Reason::kOneConnection:
      return "CUDA_DEVICE_MAX_CONNECTIONS=1: a chain of kernels would hold up the program's own";
    case Reason::kOpNotAsked:
      return "not among --ops";
    case Reason::kOpNotSupported:
      return "this operation is always exact";
    case Reason::kTypeNotSupported:
      return "only bf16, fp16 and fp32 are compressed";
    case Reason::kRedOpNotSupported:
      return "only sum, avg and pre-multiplied sum are compressed";
    case Reason::kBelowFloor:
      return "smaller than --min-bytes";
    case Reason::kEmpty:
      return "no elements";
    case Reason::kCapturing:
      return "being captured into a CUDA graph";
    case Reason::kFp32Moved:
      return "fp32 data that is moved, not summed, needs --ops NAME-fp32";
    case Reason::kNoise:
      return "with noise of one bf16 ulp added";
    case Reason::kShadow:
      return "would be compressed, in the shadow";
    case Reason::kMessageTooLarge:
      return "a message larger than --chunk-bytes";
    case Reason::kCount:
      break;
  }
  return "unknown";
}

const char* opName(CollectiveOp op) {
  switch (op) {
    case CollectiveOp::kAllReduce:
      return "AllReduce";
    case CollectiveOp::kReduceScatter:
      return "ReduceScatter";
    case CollectiveOp::kAllGather:
      return "AllGather";
    case CollectiveOp::kBroadcast:
      return "Broadcast";
    case CollectiveOp::kReduce:
      return "Reduce";
    case CollectiveOp::kAlltoAll:
      return "AlltoAll";
    case CollectiveOp::kGather:
      return "Gather";
    case CollectiveOp::kScatter:
      return "Scatter";
    case CollectiveOp::kSend:
      return "Send";
    case CollectiveOp::kRecv:
      return "Recv";
    case CollectiveOp::kCount:
      break;
  }
  return "unknown";
}

const char* dataTypeName(ncclDataType_t type) {
  static constexpr const char* kNames[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                           "fp16", "fp32",  "fp64",  "bf16",   "e4m3",  "e5m2"};
  return type >= 0 && type < ncclNumTypes ? kNames[type] : "unknown";
}

LinkDefaults linkDefaults(const Settings& settings, bool nvlink) {
  const LinkDefaults& link = nvlink ? kNvlink : kOtherLink;
  return {settings.min_bytes.value_or(link.floor_bytes), settings.chunk_bytes.value_or(link.chunk_bytes)};
}

Reason decideCommunicator(const Settings& s, uint32_t ranks) {
  if (s.mode == Mode::kOff) return Reason::kModeOff;
  if (ranks <= 1) return Reason::kOneRank;
  if (s.comms == CommScope::kWorld) {
    if (s.world_size == 0) return Reason::kJobSizeUnknown;
    if (ranks != static_cast<uint32_t>(s.world_size)) return Reason::kCommNotSelected;
  }
  if (s.comms == CommScope::kSize && ranks != static_cast<uint32_t>(s.comm_size))
    return Reason::kCommNotSelected;
  if (ranks > kMaxFlatRanks) return Reason::kTooManyRanks;
  return Reason::kCompressed;
}

bool wireDataType(ncclDataType_t type, DataType* out) {
  switch (type) {
    case ncclBfloat16:
      *out = DataType::kBf16;
      return true;
    case ncclFloat16:
      *out = DataType::kFp16;
      return true;
    case ncclFloat32:
      *out = DataType::kFp32;
      return true;
    default:
      return false;
  }
}

ncclDataType_t ncclDataType(DataType type) {
  switch (type) {
    case DataType::kBf16:
      return ncclBfloat16;
    case DataType::kFp16:
      return ncclFloat16;
    case DataType::kFp32:
      break;
  }
  return ncclFloat32;
}

uint64_t messageScratchLimit(uint64_t chunk_bytes) { return 4 * chunk_bytes; }

bool reducesData(CollectiveOp op) {
  return op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduceScatter || op == CollectiveOp::kReduce;
}

Reason decideCall(const Agreement& agreement, const CallShape& call) {
  if (agreement.comm != Reason::kCompressed) return agreement.comm;
  const Settings& s = agreement.settings;
  Wish wish{};
  if (!wishOf(call.op, &wish)) return Reason::kOpNotSupported;
  if (!asked(s, wish.half)) return Reason::kOpNotAsked;
  const bool noise = s.mode == Mode::kNoise;
  const bool shadow = s.mode == Mode::kShadow;
  const bool whole = call.op == CollectiveOp::kAllReduce || call.op == CollectiveOp::kReduceScatter;
  if (!whole && (noise || (shadow && call.op != CollectiveOp::kAllGather))) return Reason::kOpNotSupported;
  DataType type;
  if (!wireDataType(call.type, &type)) return Reason::kTypeNotSupported;
  // A created operator may be gone when a group ends, its scalar when a shadow runs.
  if ((noise || shadow) && call.redop == RedOpKind::kPreMulSum) return Reason::kRedOpNotSupported;
  const bool reduces = reducesData(call.op);
  if (reduces && call.redop != RedOpKind::kSum && call.redop != RedOpKind::kAvg &&
      call.redop != RedOpKind::kPreMulSum) {
    return Reason::kRedOpNotSupported;
  }
  if (type == DataType::kFp32 && !asked(s, wish.fp32)) return Reason::kFp32Moved;
  if (call.count == 0) return Reason::kEmpty;
  if (messageBytes(call.op, call.type, call.count, agreement.ranks) < agreement.floor_bytes)
    return Reason::kBelowFloor;
  const bool message = call.op == CollectiveOp::kSend || call.op == CollectiveOp::kRecv;
  if (message && call.count * ncclTypeBytes(call.type) > agreement.chunk_bytes)
    return Reason::kMessageTooLarge;
  // A graph would replay the same noise, and its samples would never be read.
  if (call.capturing && (noise || shadow)) return Reason::kCapturing;
  return Reason::kCompressed;
}

uint64_t messageBytes(CollectiveOp op, ncclDataType_t type, uint64_t count, uint32_t ranks) {
  const uint64_t bytes = count * ncclTypeBytes(type);
  switch (op) {
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllGather:
    case CollectiveOp::kAlltoAll:
    case CollectiveOp::kGather:
    case CollectiveOp::kScatter:
      return bytes * ranks;
    default:
      return bytes;
  }
}

uint64_t ringBytes(CollectiveOp op, ncclDataType_t type, uint64_t count, uint32_t ranks) {
  if (ranks <= 1) return 0;
  const uint64_t bytes = count * ncclTypeBytes(type);
  switch (op) {
    case CollectiveOp::kAllReduce:
      // Every call passes here: integers, where they hold the product.
      if (bytes < (1ull << 40)) return 2 * bytes * (ranks - 1) / ranks;
      return static_cast<uint64_t>(2.0L * static_cast<long double>(bytes) * (ranks - 1) / ranks);
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllGather:
    case CollectiveOp::kAlltoAll:
      return bytes * (ranks - 1);
    case CollectiveOp::kRecv:
      return 0;
    default:
      return bytes;
  }
}

}  // namespace halfwire
