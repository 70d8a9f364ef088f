// Reads PyTorch profiler (Kineto) Chrome traces of any age as a stream: windows of bounded size, cut where an
// event ends, each parsed by simdjson. Memory grows with what is kept of the device and its launches, not
// with the file.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "trace/byte_source.h"
#include "trace/comm_patterns.h"
#include "trace/timeline.h"

namespace halfwire::trace {

struct ReadOptions {
  // Called now and then with bytes read and the file's size.
  std::function<void(uint64_t, uint64_t)> progress;
  size_t window_bytes = 256 << 10;
  size_t max_window_bytes = 64 << 20;  // the largest single event that is still read
};

// kInvalidData with the byte offset (in the decompressed JSON) or the field if the bytes are not a whole
// trace. Damage that can be mended is mended and reported in Timeline::warnings.
Result<Timeline> readKineto(ByteSource& source, const std::string& file, const CommPatterns& patterns,
                            const ReadOptions& options = {});

}  // namespace halfwire::trace
