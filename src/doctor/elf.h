// What an ELF file says about NCCL: whether it needs it, defines it, or carries it hidden inside.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace halfwire {

struct ElfFacts {
  std::vector<std::string> needed;  // DT_NEEDED entries in order
  bool uses_nccl = false;           // refers to ncclAllReduce, defined elsewhere
  bool defines_nccl = false;        // exports ncclAllReduce itself
  bool carries_nccl = false;        // holds NCCL's version banner: NCCL is linked in, exported or not
};

// Reads a 64-bit little-endian ELF file. Every offset in it is checked against the file's size. Thread-safe.
Result<ElfFacts> readElf(const std::string& path);

}  // namespace halfwire
