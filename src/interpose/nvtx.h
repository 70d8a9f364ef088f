// NVTX ranges of the domain "halfwire": what a profiler shows around the calls that launch a collective's
// kernels, where its own name is lost among NCCL's sends and receives. Without a tool attached nothing is
// formatted and nothing runs.
#pragma once

#include <string>

namespace halfwire::nvtx {

// Whether a tool listens. The first call looks for one, as NVTX does: by NVTX_INJECTION64_PATH. Thread-safe.
bool attached();

// A range on the calling thread for as long as it lives; none if `text` is empty or no tool listens.
class Range {
 public:
  explicit Range(const std::string& text);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace halfwire::nvtx
