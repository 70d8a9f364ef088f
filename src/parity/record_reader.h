// Reads the record of one rank (docs/parity-record.md), line by line and within bounded memory.
#pragma once

#include <string>

#include "base/status.h"
#include "parity/record.h"
#include "trace/byte_source.h"

namespace halfwire::parity {

// What one file may hold. Beyond them a file is refused: it is not what a recorder writes.
struct RecordLimits {
  size_t line_bytes = 1 << 20;
  size_t groups = 1024;
  int64_t ranks = 1 << 20;
  uint64_t stored_bytes = uint64_t{4} << 30;
};

// `name` is the file's, for messages. A line that is not whole at the end of the file is left out and marked
// (`cut_short`); any other line that cannot be understood is kInvalidData with its number and the field.
Result<RankRecord> readRankRecord(trace::ByteSource* source, const std::string& name,
                                  const Progress& progress = {}, const RecordLimits& limits = {});

}  // namespace halfwire::parity
