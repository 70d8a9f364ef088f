#include "trace/comm_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace halfwire::trace {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Substrings of lower-case names that make a kernel communication: NCCL, RCCL and their relatives,
// device-side libraries, the custom all-reduces of inference engines, symmetric-memory kernels, dispatch and
// combine of expert parallelism.
constexpr std::array kCommunication = {"nccl",
                                       "rccl",
                                       "msccl",
                                       "nvshmem",
                                       "deep_ep",
                                       "deepep",
                                       "hccl",
                                       "oneccl",
                                       "rocshmem",
                                       "cross_device_reduce",
                                       "allreduce_fusion",
                                       "one_shot_all_reduce",
                                       "oneshot_all_reduce",
                                       "oneshotallreduce",
                                       "one_shot_allreduce",
                                       "two_shot_all_reduce",
                                       "twoshot_all_reduce",
                                       "twoshotallreduce",
                                       "two_shot_allreduce",
                                       "multimem_all_reduce",
                                       "multimem_allreduce",
                                       "multimem_one_shot",
                                       "multimem_all_gather",
                                       "multimem_reduce_scatter",
                                       "quickreduce",
                                       "quick_reduce",
                                       "lamport",
                                       "symm_mem",
                                       "symmetric_memory",
                                       "userbuffers",
                                       "all2all_kernel",
                                       "moe_a2a"};

// "nccl" inside a longer word that has nothing to do with it would be a false hit; none is known.
bool looksLikeCommunication(std::string_view name) {
  for (const char* part : kCommunication) {
    if (has(name, part)) return true;
  }
  // DeepEP before its namespace was renamed; the layout kernel computes offsets and sends nothing.
  return has(name, "dpsk::ep::");
}

bool isLayoutKernel(std::string_view name) { return has(name, "get_dispatch_layout"); }

ElementType elementFromKernel(std::string_view name) {
  // ncclDevKernel_AllReduce_Sum_bf16_RING_LL, ncclKernel_AllReduce_RING_LL_Sum_float,
  // ncclSymkDevKernel_..._f32
  struct Suffix {
    std::string_view text;
    ElementType type;
  };
  static constexpr Suffix kSuffixes[] = {
      {"_bf16", ElementType::kBf16},      {"bfloat16", ElementType::kBf16}, {"_f16", ElementType::kFp16},
      {"_half", ElementType::kFp16},      {"_f32", ElementType::kFp32},     {"_float", ElementType::kFp32},
      {"_f64", ElementType::kFp64},       {"_double", ElementType::kFp64},  {"_f8e4m3", ElementType::kFp8},
      {"_f8e5m2", ElementType::kFp8},     {"_u8", ElementType::kInt8},      {"_int8_t", ElementType::kInt8},
      {"_uint8_t", ElementType::kInt8},   {"_u32", ElementType::kInt32},    {"_int32_t", ElementType::kInt32},
      {"_uint32_t", ElementType::kInt32}, {"_u64", ElementType::kInt64},    {"_int64_t", ElementType::kInt64},
      {"_uint64_t", ElementType::kInt64},
  };
  for (const Suffix& s : kSuffixes) {
    if (has(name, s.text)) return s.type;
  }
  return ElementType::kUnknown;
}

}  // namespace

Collective collectiveFromText(std::string_view text) {
  std::string name = lower(text);
  std::erase_if(name, [](char c) { return c == '_' || c == '-' || c == ' '; });
  // Order matters: "reducescatter" and "allreduce" contain "reduce".
  if (has(name, "allreduce") || has(name, "crossdevicereduce") || has(name, "quickreduce") ||
      has(name, "lamport")) {
    return Collective::kAllReduce;
  }
  if (has(name, "reducescatter")) return Collective::kReduceScatter;
  if (has(name, "allgather")) return Collective::kAllGather;
  if (has(name, "alltoall") || has(name, "all2all")) return Collective::kAllToAll;
  if (has(name, "sendrecv")) return Collective::kSendRecv;
  if (has(name, "broadcast") || has(name, "bcast")) return Collective::kBroadcast;
  if (has(name, "barrier")) return Collective::kBarrier;
  if (has(name, "dispatch")) return Collective::kDispatch;
  if (has(name, "combine")) return Collective::kCombine;
  if (has(name, "gather")) return Collective::kGather;
  if (has(name, "scatter")) return Collective::kScatter;
  if (has(name, "reduce")) return Collective::kReduce;
  if (has(name, "send") || has(name, "recv")) return Collective::kSendRecv;
  return Collective::kGeneric;
}

ElementType elementFromText(std::string_view text) {
  const std::string name = lower(text);
  if (has(name, "bfloat16") || has(name, "bf16")) return ElementType::kBf16;
  if (has(name, "float8") || has(name, "fp8")) return ElementType::kFp8;
  if (has(name, "half") || has(name, "float16") || has(name, "fp16")) return ElementType::kFp16;
  if (has(name, "double") || has(name, "float64")) return ElementType::kFp64;
  if (has(name, "float")) return ElementType::kFp32;
  if (has(name, "long") || has(name, "int64")) return ElementType::kInt64;
  if (has(name, "short") || has(name, "int16")) return ElementType::kInt16;
  if (has(name, "byte") || has(name, "char") || has(name, "int8") || has(name, "bool"))
    return ElementType::kInt8;
  if (has(name, "int")) return ElementType::kInt32;
  return ElementType::kUnknown;
}

Result<CommPatterns> CommPatterns::create(const std::vector<std::string>& extra) {
  CommPatterns patterns;
  for (const std::string& text : extra) {
    std::string expression = text;
    Collective type = Collective::kGeneric;
    if (const size_t eq = text.rfind('='); eq != std::string::npos) {
      const std::string wanted = text.substr(eq + 1);
      for (int i = 0; i <= static_cast<int>(Collective::kGeneric); ++i) {
        if (wanted != collectiveName(static_cast<Collective>(i))) continue;
        type = static_cast<Collective>(i);
        expression = text.substr(0, eq);
      }
    }
    if (expression.empty() || expression.size() > 1000) {
      return Status(StatusCode::kInvalidArgument, "a communication pattern must have 1 to 1000 characters");
    }
    try {
      patterns.extra_.push_back(
          {std::regex(expression, std::regex::ECMAScript | std::regex::icase | std::regex::nosubs), type});
    } catch (const std::regex_error& e) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("the communication pattern '{}' is not a regular expression: {}", expression,
                                e.what()));
    }
  }
  return patterns;
}

CommPatterns::Match CommPatterns::classify(std::string_view kernel_name) const {
  const std::string name = lower(kernel_name);
  Match match;
  if (has(name, "halfwire")) {
    match.kind = ActivityKind::kCodec;
    return match;
  }
  // The function's own name decides the collective; template arguments and parameters may name anything.
  std::string_view base = name;
  if (const size_t paren = base.find('('); paren != std::string_view::npos && paren > 0)
    base = base.substr(0, paren);
  // std::regex recurses once for each character; very long names would exhaust the stack.
  const std::string_view head = std::string_view(name).substr(0, 2000);
  for (const Extra& extra : extra_) {
    if (!std::regex_search(head.begin(), head.end(), extra.pattern)) continue;
    match.kind = ActivityKind::kComm;
    match.type = extra.type == Collective::kGeneric ? collectiveFromText(base) : extra.type;
    match.element = elementFromKernel(base);
    return match;
  }
  if (!looksLikeCommunication(name) || isLayoutKernel(name)) return match;
  match.kind = ActivityKind::kComm;
  match.type = collectiveFromText(base);
  match.element = elementFromKernel(base);
  // NCCL moves anything as bytes where it does not reduce: the type in such a name says nothing about the
  // data.
  const bool reduces = match.type == Collective::kAllReduce || match.type == Collective::kReduceScatter ||
                       match.type == Collective::kReduce;
  if (!reduces && match.element == ElementType::kInt8) match.element = ElementType::kUnknown;
  return match;
}

}  // namespace halfwire::trace
