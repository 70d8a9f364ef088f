#include "support/rank.h"

#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "support/channel.h"

namespace halfwire::testing {
namespace {

std::map<std::string, RankProgram>& registry() {
  static std::map<std::string, RankProgram> programs;
  return programs;
}

std::atomic<const char*> g_note_text{"start"};
std::atomic<long> g_note_number{-1};
std::atomic<const char*> g_work_text{"nothing noted"};
std::atomic<long> g_work_number{-1};
std::atomic_flag g_printing = ATOMIC_FLAG_INIT;

void writeText(const char* text) { (void)!write(STDERR_FILENO, text, strlen(text)); }

// Runs in each thread when the parent asks where the rank hangs.
void printBacktrace(int) {
  for (int i = 0; i < 2000 && g_printing.test_and_set(); ++i) usleep(1000);
  char line[96];
  snprintf(line, sizeof line, "--- thread %ld\n", syscall(SYS_gettid));
  writeText(line);
  void* frames[32];
  const int n = backtrace(frames, 32);
  // The first two frames are this handler and the kernel's trampoline.
  if (n > 2) backtrace_symbols_fd(frames + 2, n - 2, STDERR_FILENO);
  g_printing.clear();
}

void printWhereabouts(int) {
  char line[160];
  snprintf(line, sizeof line, "--- asked where it is: %s %ld; streams: %s %ld\n", g_note_text.load(),
           g_note_number.load(), g_work_text.load(), g_work_number.load());
  writeText(line);
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  const pid_t pid = getpid();
  while (const dirent* entry = readdir(tasks)) {
    const int tid = atoi(entry->d_name);
    if (tid > 0) syscall(SYS_tgkill, pid, tid, SIGUSR2);
  }
  closedir(tasks);
}

}  // namespace

RankProgramRegistration::RankProgramRegistration(const char* name, RankProgram program) {
  registry()[name] = program;
}

std::vector<std::string> Rank::allGather(const std::string& bytes) {
  if (!sendFrame(fd_, FrameType::kGather, bytes)) RANK_FAIL("the parent has gone");
  Frame frame;
  if (!receiveFrame(fd_, &frame) || frame.type != FrameType::kGathered) RANK_FAIL("the parent has gone");
  std::vector<std::string> all;
  size_t at = 0;
  while (at + sizeof(uint32_t) <= frame.bytes.size()) {
    uint32_t n = 0;
    memcpy(&n, frame.bytes.data() + at, sizeof n);
    at += sizeof n;
    all.push_back(frame.bytes.substr(at, n));
    at += n;
  }
  return all;
}

void Rank::report(const std::string& key, const std::string& value) {
  if (!sendFrame(fd_, FrameType::kReport, key + '\n' + value)) RANK_FAIL("the parent has gone");
}

void Rank::note(const char* text, long number) {
  g_note_number.store(number, std::memory_order_relaxed);
  g_note_text.store(text, std::memory_order_relaxed);
}

void Rank::noteWork(const char* text, long number) {
  g_work_number.store(number, std::memory_order_relaxed);
  g_work_text.store(text, std::memory_order_relaxed);
}

void Rank::fail(const char* file, int line, const std::string& message) {
  const char* base = strrchr(file, '/');
  fprintf(stderr, "FAILED %s:%d: %s (at: %s %ld)\n", base != nullptr ? base + 1 : file, line, message.c_str(),
          g_note_text.load(), g_note_number.load());
  fflush(stdout);
  fflush(stderr);
  std::_Exit(1);
}

std::optional<int> runAsRank(int, char**) {
  const char* name = getenv(kProgramVariable);
  if (name == nullptr) return std::nullopt;
  const auto found = registry().find(name);
  if (found == registry().end()) {
    fprintf(stderr, "no rank program is called %s\n", name);
    return 2;
  }
  Rank rank;
  rank.fd_ = atoi(getenv(kChannelVariable));
  rank.rank_ = atoi(getenv("RANK"));
  rank.ranks_ = atoi(getenv("WORLD_SIZE"));
  const std::string args = getenv(kArgumentsVariable) != nullptr ? getenv(kArgumentsVariable) : "";
  for (size_t at = 0; at < args.size();) {
    const size_t end = args.find('\n', at);
    rank.args_.push_back(args.substr(at, end - at));
    at = end == std::string::npos ? args.size() : end + 1;
  }
  fcntl(rank.fd_, F_SETFD, FD_CLOEXEC);
  unsetenv(kProgramVariable);

  void* frames[4];
  backtrace(frames, 4);  // loads what backtrace() needs now, not in a signal handler
  signal(SIGUSR2, printBacktrace);
  signal(SIGUSR1, printWhereabouts);
  signal(SIGPIPE, SIG_IGN);
  setvbuf(stdout, nullptr, _IOLBF, 0);

  found->second(rank);
  Rank::note("returned from the program");
  return 0;
}

}  // namespace halfwire::testing
