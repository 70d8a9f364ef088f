#include "interpose/process_log.h"

#include <unistd.h>

#include <cstdlib>
#include <mutex>

namespace halfwire {
namespace {

struct Kept {
  std::mutex mutex;
  RunLog* log = nullptr;
  pid_t pid = 0;  // of the process that tried to make it; a forked child makes its own
};
constinit Kept kept;

RunLog* make(const std::string& directory) {
  if (kept.pid == getpid()) return kept.log;
  kept.pid = getpid();
  kept.log = nullptr;
  auto made = RunLog::create(directory);
  if (!made.ok()) return nullptr;
  kept.log = std::move(made).value().release();
  const char* rank = std::getenv("RANK");
  kept.log->file().rank = rank != nullptr ? std::atoi(rank) : -1;
  // After the file is there: a process that ends normally says so.
  std::atexit([] {
    if (getpid() == kept.pid && kept.log != nullptr) kept.log->file().closed.store(1);
  });
  return kept.log;
}

}  // namespace

RunLog* processLog(const std::string& directory) {
  std::lock_guard lock(kept.mutex);
  return make(directory);
}

void logError(RunLog& log, const std::string& words) {
  std::lock_guard lock(kept.mutex);
  RunLog::setText(log.file().error, words);
}

void logNote(const std::string& words) noexcept {
  const char* directory = std::getenv("HALFWIRE_LOG_DIR");
  if (directory == nullptr || *directory == '\0') return;
  // Held only while another thread notes its own words, or for ever in a child forked at that moment.
  std::unique_lock lock(kept.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  try {
    RunLog* log = make(directory);
    if (log == nullptr || log->file().error[0] != '\0') return;
    RunLog::setText(log->file().error, words);
  } catch (const std::exception&) {  // out of memory: the program's dlopen worked, and that is what matters
  }
}

}  // namespace halfwire
