#include "launch/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

extern char** environ;

namespace halfwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT, SIGWINCH};

// Blocks the signals that the wait loop takes, and makes this process the parent of orphaned descendants.
// Puts everything back.
class ProcessState {
 public:
  ProcessState() {
    sigemptyset(&waited_);
    sigaddset(&waited_, SIGCHLD);
    for (const int s : kPassedOn) sigaddset(&waited_, s);
    sigprocmask(SIG_BLOCK, &waited_, &old_mask_);
    // An inherited SIG_IGN would reap children before their exit codes are read.
    struct sigaction plain{};
    plain.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &plain, &old_child_action_);
    prctl(PR_GET_CHILD_SUBREAPER, &old_subreaper_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~ProcessState() {
    prctl(PR_SET_CHILD_SUBREAPER, old_subreaper_);
    sigaction(SIGCHLD, &old_child_action_, nullptr);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  ProcessState(const ProcessState&) = delete;
  ProcessState& operator=(const ProcessState&) = delete;

  // In a child, before exec. Async-signal-safe.
  void restoreInChild() const {
    sigaction(SIGCHLD, &old_child_action_, nullptr);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  }

  // The next signal, or 0 at `deadline`.
  int wait(Clock::time_point deadline, siginfo_t* info) const {
    for (;;) {
      const auto left = std::max(deadline - Clock::now(), Clock::duration::zero());
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
      timespec time{};
      time.tv_sec = static_cast<time_t>(std::min<int64_t>(seconds.count(), 3600));
      time.tv_nsec =
          static_cast<long>(std::chrono::duration_cast<std::chrono::nanoseconds>(left - seconds).count());
      const int signal = sigtimedwait(&waited_, info, &time);
      if (signal > 0) return signal;
      if (errno == EAGAIN && Clock::now() >= deadline) return 0;
    }
  }

 private:
  sigset_t waited_{}, old_mask_{};
  struct sigaction old_child_action_{};
  int old_subreaper_ = 0;
};

struct Child {
  pid_t pid = -1;
  bool running = false;
};

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (const std::string& s : strings) out.push_back(const_cast<char*>(s.c_str()));
  out.push_back(nullptr);
  return out;
}

// Forks and executes. `*error` is the errno of the exec, 0 if it succeeded.
pid_t start(const LaunchOptions& options, const std::vector<std::string>& environment,
            const ProcessState& state, int* error) {
  // Everything that allocates happens before the fork.
  const std::vector<char*> argv = pointers(options.command);
  const std::vector<char*> envp = pointers(environment);
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    *error = errno;
    return -1;
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    if (options.ranks) {
      setpgid(0, 0);
      const int null = open("/dev/null", O_RDONLY);
      if (null > 0) dup2(null, STDIN_FILENO), close(null);
    }
    // A launcher can clean up after SIGTERM; a rank has nothing to clean up that its peers could use.
    prctl(PR_SET_PDEATHSIG, options.ranks ? SIGKILL : SIGTERM);
    if (getppid() != parent) _exit(127);
    state.restoreInChild();
    execvpe(argv[0], argv.data(), envp.data());
    const int why = errno;
    const ssize_t written = write(report[1], &why, sizeof why);
    _exit(written == sizeof why ? 127 : 126);
  }
  *error = pid < 0 ? errno : 0;
  close(report[1]);
  if (pid > 0) {
    if (options.ranks) setpgid(pid, pid);  // also here: the group must exist before a signal is passed on
    ssize_t n;
    do n = read(report[0], error, sizeof *error);
    while (n < 0 && errno == EINTR);
    if (n != sizeof *error) *error = 0;
    if (*error != 0) waitpid(pid, nullptr, 0);
  }
  close(report[0]);
  return pid;
}

// Children of this process, as the kernel sees them.
std::vector<pid_t> childrenOf(pid_t parent) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream in(entry.path() / "stat");
    std::string text;
    std::getline(in, text);
    const size_t end = text.rfind(')');  // the name before it may hold anything
    if (end == std::string::npos || end + 4 > text.size()) continue;
    char* rest = nullptr;
    const long ppid = std::strtol(text.c_str() + end + 4, &rest, 10);
    if (ppid == parent) found.push_back(static_cast<pid_t>(std::atol(name.c_str())));
  }
  return found;
}

int exitCode(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

enum class Stage { kRunning, kEndingByThemselves, kTerminating };

// The running job.
class Job {
 public:
  Job(const LaunchOptions& options, const ProcessState& state)
      : options_(options), state_(state), before_(childrenOf(getpid())) {}

  Status startAll() {
    for (const auto& environment : options_.environments) {
      int error = 0;
      const pid_t pid = start(options_, environment, state_, &error);
      if (error != 0) {
        stopAll(SIGKILL);
        while (running() > 0) reap();
        const char* cure = error == ENOENT || error == EACCES || error == ENOEXEC
                               ? "give a program that is on PATH, or its path, and that may be executed"
                               : "free some resources of this machine";
        return {StatusCode::kUnavailable,
                fmt::format("cannot start '{}' ({}): {}", options_.command[0], std::strerror(error), cure)};
      }
      children_.push_back({pid, true});
    }
    return {};
  }

  LaunchOutcome run() {
    auto deadline = Clock::time_point::max();
    while (running() > 0) {
      siginfo_t info{};
      const int signal = state_.wait(std::min(deadline, Clock::now() + std::chrono::hours(1)), &info);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal != 0) {
        passOn(signal, info);
      }
      if (failed() && options_.ranks && stage_ == Stage::kRunning) {
        // Ranks that were just asked to end may be saving their state: not a second signal at once.
        stage_ = Stage::kEndingByThemselves;
        deadline = signalled_ ? Clock::now() + options_.grace_after_signal : Clock::now();
      }
      if (Clock::now() < deadline || running() == 0) continue;
      if (stage_ == Stage::kEndingByThemselves) {
        stage_ = Stage::kTerminating;
        outcome_.terminated = running();
        stopAll(SIGTERM);
        stopAll(SIGCONT);  // a stopped process would not see it
        deadline = Clock::now() + options_.grace;
      } else {
        outcome_.killed = running();
        stopAll(SIGKILL);
        deadline = Clock::time_point::max();
      }
    }
    // What a dead launcher or rank leaves behind holds GPUs and ports.
    if (failed() && (options_.ranks || outcome_.signal != 0)) stopOrphans();
    return outcome_;
  }

 private:
  int running() const {
    return static_cast<int>(
        std::count_if(children_.begin(), children_.end(), [](const Child& c) { return c.running; }));
  }
  bool failed() const { return outcome_.failed_rank >= 0; }

  void stopAll(int signal) {
    for (const Child& c : children_) {
      if (c.running) kill(options_.ranks ? -c.pid : c.pid, signal);
    }
  }

  void passOn(int signal, const siginfo_t& info) {
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT) signalled_ = true;
    if (!options_.ranks) {
      // What the terminal sends reaches the child directly: it is in our process group.
      if (info.si_code != SI_KERNEL) stopAll(signal);
    } else {
      stopAll(signal);
    }
    if (signal == SIGTSTP) raise(SIGSTOP);
  }

  void reap() {
    for (;;) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG);
      if (pid <= 0) return;
      for (size_t i = 0; i < children_.size(); ++i) {
        if (children_[i].pid != pid) continue;
        children_[i].running = false;
        if (exitCode(status) == 0 || failed()) continue;
        outcome_.exit_code = exitCode(status);
        outcome_.failed_rank = static_cast<int>(i);
        outcome_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
      }
    }
  }

  std::vector<pid_t> orphans() {
    reap();
    std::vector<pid_t> all = childrenOf(getpid());
    std::erase_if(all,
                  [&](pid_t pid) { return std::find(before_.begin(), before_.end(), pid) != before_.end(); });
    return all;
  }

  void stopOrphans() {
    // New ones appear while their parents die, so look again until none is left.
    const auto deadline = Clock::now() + options_.grace;
    std::vector<pid_t> told;
    for (std::vector<pid_t> left = orphans(); !left.empty(); left = orphans()) {
      const bool late = Clock::now() >= deadline;
      if (late && Clock::now() >= deadline + std::chrono::seconds(5))
        return;  // unkillable: stuck in the kernel
      for (const pid_t pid : left) {
        if (late) {
          kill(pid, SIGKILL);
        } else if (std::find(told.begin(), told.end(), pid) == told.end()) {
          kill(pid, SIGTERM);
          kill(pid, SIGCONT);
          told.push_back(pid);
        }
      }
      siginfo_t info{};
      state_.wait(Clock::now() + std::chrono::milliseconds(50), &info);
    }
  }

  const LaunchOptions& options_;
  const ProcessState& state_;
  const std::vector<pid_t> before_;
  std::vector<Child> children_;
  LaunchOutcome outcome_;
  Stage stage_ = Stage::kRunning;
  bool signalled_ = false;  // a signal that asks for the end was passed on
};

}  // namespace

Result<LaunchOutcome> launch(const LaunchOptions& options) {
  if (options.command.empty() || options.environments.empty()) {
    return Status(StatusCode::kInvalidArgument, "there is no command to run");
  }
  const ProcessState state;
  Job job(options, state);
  if (Status status = job.startAll(); !status.ok()) return status;
  return job.run();
}

std::vector<std::string> rankEnvironment(const std::vector<std::string>& base, int rank, int ranks,
                                         int master_port) {
  std::vector<std::string> environment = base;
  setVariable(&environment, "RANK", std::to_string(rank));
  setVariable(&environment, "WORLD_SIZE", std::to_string(ranks));
  setVariable(&environment, "LOCAL_RANK", std::to_string(rank));
  setVariable(&environment, "LOCAL_WORLD_SIZE", std::to_string(ranks));
  setVariable(&environment, "MASTER_ADDR", "127.0.0.1");
  setVariable(&environment, "MASTER_PORT", std::to_string(master_port));
  return environment;
}

Result<int> freePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool ok = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (ok) return static_cast<int>(ntohs(address.sin_port));
  return Status(StatusCode::kUnavailable,
                fmt::format("no free TCP port on 127.0.0.1 for the ranks to meet ({}): check that "
                            "the loopback interface is up",
                            std::strerror(error)));
}

void setVariable(std::vector<std::string>* environment, const std::string& name, const std::string& value) {
  unsetVariable(environment, name);
  environment->push_back(name + "=" + value);
}

void unsetVariable(std::vector<std::string>* environment, const std::string& name) {
  const std::string prefix = name + "=";
  std::erase_if(*environment, [&](const std::string& entry) { return entry.starts_with(prefix); });
}

const char* findVariable(const std::vector<std::string>& environment, const std::string& name) {
  const std::string prefix = name + "=";
  for (const std::string& entry : environment) {
    if (entry.starts_with(prefix)) return entry.c_str() + prefix.size();
  }
  return nullptr;
}

std::vector<std::string> currentEnvironment() {
  std::vector<std::string> environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
    environment.emplace_back(*entry);
  return environment;
}

}  // namespace halfwire
