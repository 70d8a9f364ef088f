// From what a user names on a command line to timelines.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "trace/kineto_reader.h"

namespace halfwire::trace {

// Files as they are; a folder becomes the traces in it (.json, .json.gz, .sqlite), by name with numbers in
// order. A folder without any, or a path that does not exist, is kInvalidData.
Result<std::vector<std::string>> expandInputs(const std::vector<std::string>& paths);

// Tells the format by the file's first bytes.
Result<Timeline> readTrace(const std::string& path, const CommPatterns& patterns,
                           const ReadOptions& options = {});

}  // namespace halfwire::trace
