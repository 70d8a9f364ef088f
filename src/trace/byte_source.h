// Bytes of a file from front to back, decompressed on the way if they are gzip.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace halfwire::trace {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills up to `size` bytes; fewer only at the end of the data. A damaged file is kInvalidData.
  virtual Result<size_t> read(char* to, size_t size) = 0;
  // Bytes of the file itself read so far, and its size: for a progress bar.
  virtual uint64_t position() const = 0;
  virtual uint64_t size() const = 0;
  virtual bool compressed() const { return false; }
};

// A regular file, plain or gzip (told by its first bytes, not by its name).
Result<std::unique_ptr<ByteSource>> openFile(const std::string& path);
// Borrowed memory, not decompressed.
std::unique_ptr<ByteSource> memorySource(std::string_view bytes);

}  // namespace halfwire::trace
