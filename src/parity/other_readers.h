// Logs of other tools as runs of one rank: what they hold is less than a record, and so are the findings.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "parity/record.h"

namespace halfwire::parity {

// What one file may hold.
inline constexpr uint64_t kMostLogBytes = uint64_t{4} << 30;

// A table whose first line names its columns, separated by commas, semicolons or tabs. Needs a step (or takes
// the line's number) and a loss; rates, gradient norms and some more are taken where they are named as usual.
Result<Run> readCsv(const std::string& path, const Progress& progress = {});
// TensorBoard event files of one run, in order of time.
Result<Run> readTensorBoard(const std::vector<std::string>& paths, const Progress& progress = {});
// Hugging Face `trainer_state.json`.
Result<Run> readTrainerState(const std::string& path);
// The standard output of Megatron-LM and what prints alike.
Result<Run> readMegatronLog(const std::string& path, const Progress& progress = {});

// What a file holds, told by its first bytes and its name.
bool looksLikeTensorBoard(std::string_view start, std::string_view name);
bool looksLikeMegatron(std::string_view start);

}  // namespace halfwire::parity
