// Which kernels are communication, and which collective: a table of name patterns that users can extend.
#pragma once

#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "trace/timeline.h"

namespace halfwire::trace {

// Immutable after creation; classify() may be called from several threads. It runs regular expressions: call
// it once for each distinct name.
class CommPatterns {
 public:
  // `extra`: regular expressions (ECMAScript, any case) for further communication kernels, optionally
  // "REGEX=type" with a type as printed by collectiveName. A broken expression is kInvalidArgument.
  static Result<CommPatterns> create(const std::vector<std::string>& extra);

  struct Match {
    ActivityKind kind = ActivityKind::kCompute;  // kComm, kCodec or kCompute
    Collective type = Collective::kGeneric;
    ElementType element = ElementType::kUnknown;
  };
  // Of a kernel.
  Match classify(std::string_view kernel_name) const;

 private:
  struct Extra {
    std::regex pattern;
    Collective type;
  };
  std::vector<Extra> extra_;
};

// "allreduce", "nccl:all_reduce", "_allgather_base", "all_to_allv"...; kGeneric when not known.
Collective collectiveFromText(std::string_view text);
// "Float", "c10::BFloat16", "Half", "long int"...
ElementType elementFromText(std::string_view text);

}  // namespace halfwire::trace
