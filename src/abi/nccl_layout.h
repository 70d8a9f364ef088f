// The numbers of NCCL's ABI as a list, written once and compiled under both headers (ours and the real one).
#pragma once

#include <cstddef>
#include <vector>

namespace halfwire::abi {

// Include after either nccl.h. `static`: each translation unit describes the header it saw.
static inline std::vector<size_t> describeNcclLayout() {
  return {sizeof(ncclUniqueId),
          sizeof(ncclConfig_t),
          offsetof(ncclConfig_t, magic),
          offsetof(ncclConfig_t, version),
          offsetof(ncclConfig_t, blocking),
          offsetof(ncclConfig_t, netName),
          offsetof(ncclConfig_t, splitShare),
          offsetof(ncclConfig_t, commName),
          offsetof(ncclConfig_t, nvlinkCentricSched),
          sizeof(ncclSimInfo_t),
          offsetof(ncclSimInfo_t, estimatedTime),
          sizeof(ncclResult_t),
          sizeof(ncclDataType_t),
          sizeof(ncclRedOp_t),
          ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
          ncclInvalidUsage, ncclRemoteError, ncclInProgress, ncclNumResults,
          ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps, ncclMaxRedOp,
          ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64,
          ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclNumTypes,
          ncclScalarDevice, ncclScalarHostImmediate,
          NCCL_VERSION_CODE};
}

const std::vector<size_t>& ownNcclLayout();

}  // namespace halfwire::abi
