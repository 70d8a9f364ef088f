// From what a user names on a command line to runs.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "parity/record.h"

namespace halfwire::parity {

// The runs that a path names. "a+b" is one run whose record lies in several parts, b a resume of a. Else: a
// folder of `rank<R>.jsonl`, one such file, a log of another tool (file or folder of it), or a folder of such
// folders, by name with numbers in order. What cannot be understood is kInvalidData.
Result<std::vector<Run>> loadRuns(const std::string& path, const Progress& progress = {});

}  // namespace halfwire::parity
