// Shared by the files that define NCCL's names.
#pragma once

#include "abi/nccl.h"

namespace halfwire::hostccl {

// Notes "<function> is not implemented by the host engine" as the thread's last error; returns
// ncclInvalidUsage.
ncclResult_t refuse(const char* function);

}  // namespace halfwire::hostccl
