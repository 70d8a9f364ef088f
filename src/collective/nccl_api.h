// One loaded NCCL as a table of its functions. An entry is null where that library lacks the function.
#pragma once

#include "abi/nccl.h"

namespace halfwire {

struct NcclApi {
#define HALFWIRE_ENTRY(ret, name, params, args) ret(*name) params = nullptr;
  HALFWIRE_NCCL_FUNCTIONS(HALFWIRE_ENTRY)
#undef HALFWIRE_ENTRY
};

}  // namespace halfwire
