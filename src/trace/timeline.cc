#include "trace/timeline.h"

namespace halfwire::trace {

const char* collectiveName(Collective type) {
  switch (type) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kSendRecv:
      return "send_recv";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kDispatch:
      return "dispatch";
    case Collective::kCombine:
      return "combine";
    case Collective::kGeneric:
      break;
  }
  return "generic";
}

int elementSize(ElementType type) {
  switch (type) {
    case ElementType::kInt8:
    case ElementType::kFp8:
      return 1;
    case ElementType::kInt16:
    case ElementType::kFp16:
    case ElementType::kBf16:
      return 2;
    case ElementType::kInt32:
    case ElementType::kFp32:
      return 4;
    case ElementType::kInt64:
    case ElementType::kFp64:
      return 8;
    case ElementType::kUnknown:
      break;
  }
  return 0;
}

const char* elementName(ElementType type) {
  switch (type) {
    case ElementType::kInt8:
      return "int8";
    case ElementType::kInt16:
      return "int16";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kFp8:
      return "fp8";
    case ElementType::kFp16:
      return "fp16";
    case ElementType::kBf16:
      return "bf16";
    case ElementType::kFp32:
      return "fp32";
    case ElementType::kFp64:
      return "fp64";
    case ElementType::kUnknown:
      break;
  }
  return "";
}

}  // namespace halfwire::trace
