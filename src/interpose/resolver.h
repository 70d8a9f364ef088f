// Finds the real NCCL behind the interposed names and never finds itself.
#pragma once

#include <cstdint>
#include <string>

#include "abi/host_engine.h"
#include "base/status.h"
#include "collective/nccl_api.h"

namespace halfwire {

struct RealNccl {
  NcclApi api;
  std::string path;
  int version = 0;
  uintptr_t text_begin = 0;  // its executable bytes: calls from there are NCCL calling itself
  uintptr_t text_end = 0;
  const HalfwireHostEngine* host_engine = nullptr;  // set if it is the host engine
  std::string unknown_entry_points;                 // names it exports that this version does not know

  bool contains(const void* address) const {
    const auto a = reinterpret_cast<uintptr_t>(address);
    return a >= text_begin && a < text_end;
  }
};

// Looks in this order: `path` if not empty; the next definition in the program's global scope; a loaded
// libnccl.so.2; any loaded object that defines pncclAllReduce. Loads nothing, except `path` where it is not
// loaded yet.
Result<RealNccl> resolveNccl(const std::string& path);

// The load address of the NCCL that resolveNccl would take, of those that are loaded now and are found
// without a look into every object; null for none. Loads nothing; `path` may be null.
const void* loadedNccl(const char* path);

// The load address and path of the library of NCCL's own (by its file's name) that holds `address`; null if
// that lies elsewhere. Where NCCL is part of the program, the program's calls come from the same object, so
// only such a library's calls are NCCL's.
const void* ncclLibraryAt(const void* address, std::string* path);

}  // namespace halfwire
