// This process's run log, made by whoever first has something to put into it: the registry, or a dlopen that
// has to say why it left NCCL alone. A lock of its own, under which nothing is loaded or looked up: a dlopen
// may run inside the loader's lock, which the registry waits for while it holds its own.
#pragma once

#include <string>

#include "policy/run_log.h"

namespace halfwire {

// The log, made on the first call in `directory` (empty: in memory alone); null where it cannot be made.
// Never destroyed. A forked child gets one of its own.
RunLog* processLog(const std::string& directory);

// Puts `words` into the log's error, over what is there.
void logError(RunLog& log, const std::string& words);

// The same from a dlopen, where nothing may fail or wait: with HALFWIRE_LOG_DIR set, making the log if there
// is none, and only if the log has no error yet.
void logNote(const std::string& words) noexcept;

}  // namespace halfwire
