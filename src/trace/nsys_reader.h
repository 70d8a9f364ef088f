// Reads Nsight Systems SQLite exports, of any version: columns and tables are looked up, not assumed.
#pragma once

#include <string>

#include "base/status.h"
#include "trace/comm_patterns.h"
#include "trace/kineto_reader.h"
#include "trace/timeline.h"

namespace halfwire::trace {

// kInvalidData names the table or column that is missing or damaged. The file is opened read-only and never
// changed.
Result<Timeline> readNsys(const std::string& path, const CommPatterns& patterns,
                          const ReadOptions& options = {});

}  // namespace halfwire::trace
