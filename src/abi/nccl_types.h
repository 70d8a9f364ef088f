// Facts about NCCL's enumerations that several folders need.
#pragma once

#include <cstddef>

#include "abi/nccl.h"

namespace halfwire {

// Bytes of one element of `type`; 0 for a value NCCL 2.28 does not define.
constexpr size_t ncclTypeBytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace halfwire
