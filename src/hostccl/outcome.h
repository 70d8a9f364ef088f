// How an operation of the host engine ended: NCCL's code, and a sentence that says what is wrong and what to
// do.
#pragma once

#include <string>
#include <utility>

#include "abi/nccl.h"

namespace halfwire::hostccl {

struct [[nodiscard]] Outcome {
  Outcome() = default;
  Outcome(ncclResult_t code, std::string text) : code(code), text(std::move(text)) {}
  bool ok() const { return code == ncclSuccess; }

  ncclResult_t code = ncclSuccess;
  std::string text;
};

}  // namespace halfwire::hostccl
