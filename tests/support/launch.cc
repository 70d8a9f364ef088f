#include "support/launch.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "support/channel.h"

extern char** environ;

namespace halfwire::testing {
namespace {

using Clock = std::chrono::steady_clock;

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Variables that decide what is tested: a test sets them itself or does without.
bool inherited(const std::string& name) {
  static const std::set<std::string> dropped = {"LD_PRELOAD",
                                                "RANK",
                                                "WORLD_SIZE",
                                                "LOCAL_RANK",
                                                "MASTER_ADDR",
                                                "MASTER_PORT",
                                                "PMI_SIZE",
                                                "SLURM_NTASKS",
                                                "OMPI_COMM_WORLD_SIZE",
                                                "GTEST_FILTER",
                                                "CUDA_DEVICE_MAX_CONNECTIONS"};
  if (dropped.count(name) != 0) return false;
  return name.rfind("HALFWIRE_", 0) != 0 && name.rfind("HWTEST_", 0) != 0 && name.rfind("NCCL_", 0) != 0;
}

Environment baseEnvironment() {
  Environment env;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals == nullptr) continue;
    const std::string name(*entry, static_cast<size_t>(equals - *entry));
    if (inherited(name)) env[name] = equals + 1;
  }
  return env;
}

void merge(Environment* into, const Environment& from) {
  for (const auto& [name, value] : from) {
    if (value.empty()) {
      into->erase(name);
    } else {
      (*into)[name] = value;
    }
  }
}

// Forks and executes; `fds` are kept open in the child, `out` and `err` become its stdout and stderr. -1 if
// fork fails.
pid_t spawn(const std::vector<std::string>& argv, const Environment& env, int out, int err,
            const std::vector<int>& fds) {
  std::vector<std::string> env_text;
  for (const auto& [name, value] : env) env_text.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (auto& text : env_text) envp.push_back(text.data());
  envp.push_back(nullptr);
  std::vector<char*> args;
  for (const auto& text : argv) args.push_back(const_cast<char*>(text.c_str()));
  args.push_back(nullptr);

  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  for (const int fd : fds) fcntl(fd, F_SETFD, 0);
  execvpe(args[0], args.data(), envp.data());
  dprintf(STDERR_FILENO, "cannot execute %s: %s\n", args[0], strerror(errno));
  _exit(127);
}

std::string readFile(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// Name, state and kernel wait of every thread: what is left to see without a debugger.
std::string threadStates(pid_t pid) {
  std::ostringstream text;
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string base = entry.path().string();
    std::string name = readFile(base + "/comm");
    name.erase(std::remove(name.begin(), name.end(), '\n'), name.end());
    const std::string stat = readFile(base + "/stat");
    const size_t paren = stat.rfind(')');
    text << "    thread " << entry.path().filename().string() << " " << name << " state "
         << (paren != std::string::npos && paren + 2 < stat.size() ? stat[paren + 2] : '?') << " wchan "
         << readFile(base + "/wchan") << "\n";
  }
  return text.str();
}

struct Child {
  pid_t pid = -1;
  int channel = -1;
  int output = -1;
  bool ended = false;
  bool gathering = false;
  std::string gather_bytes;
  std::string inbox;
};

void closeFd(int* fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

// One launch: the children and the loop that serves them.
class Launch {
 public:
  Launch(const std::string& program, const LaunchOptions& options) : program_(program), options_(options) {}

  LaunchOutcome run() {
    outcome_.ranks.resize(options_.ranks);
    children_.resize(options_.ranks);
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    while (living() > 0) {
      step();
      maybeKill();
      if (secondsSince(start_) > options_.timeout_s && !outcome_.timed_out) dumpAndKill();
    }
    outcome_.wall_s = secondsSince(start_);
    return std::move(outcome_);
  }

 private:
  void start(int rank) {
    int channel[2];
    int output[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) != 0 || pipe2(output, O_CLOEXEC) != 0) {
      perror("cannot make a channel");
      abort();
    }
    const std::string library = options_.library.empty() ? libraryPath() : options_.library;
    Environment env = baseEnvironment();
    if (options_.preload && options_.without_library.count(rank) == 0)
      env["LD_PRELOAD"] = preloadValue(library);
    env["RANK"] = env["LOCAL_RANK"] = std::to_string(rank);
    env["WORLD_SIZE"] = std::to_string(options_.ranks);
    std::string args;
    for (const auto& arg : options_.args) args += arg + "\n";
    env[kProgramVariable] = program_;
    env[kChannelVariable] = std::to_string(channel[1]);
    env[kArgumentsVariable] = args;
    merge(&env, options_.env);
    if (const auto own = options_.rank_env.find(rank); own != options_.rank_env.end())
      merge(&env, own->second);

    const std::string executable = options_.executable.empty() ? "/proc/self/exe" : options_.executable;
    Child& child = children_[rank];
    child.pid = spawn({executable}, env, output[1], output[1], {channel[1]});
    if (child.pid < 0) {
      perror("cannot fork");
      abort();
    }
    close(channel[1]);
    close(output[1]);
    child.channel = channel[0];
    child.output = output[0];
    fcntl(child.channel, F_SETFL, O_NONBLOCK);
    fcntl(child.output, F_SETFL, O_NONBLOCK);
  }

  int living() const {
    return static_cast<int>(
        std::count_if(children_.begin(), children_.end(), [](const Child& c) { return !c.ended; }));
  }

  void step() {
    std::vector<pollfd> fds;
    std::vector<int> owners;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      for (const int fd : {children_[rank].channel, children_[rank].output}) {
        if (fd < 0) continue;
        fds.push_back({fd, POLLIN, 0});
        owners.push_back(rank);
      }
    }
    poll(fds.data(), fds.size(), 20);
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      Child& child = children_[owners[i]];
      if (fds[i].fd == child.output) {
        drainOutput(owners[i]);
      } else if (fds[i].fd == child.channel) {
        drainChannel(owners[i]);
      }
    }
    for (int rank = 0; rank < options_.ranks; ++rank) reap(rank);
    answerGather();
  }

  void drainOutput(int rank) {
    char buffer[65536];
    ssize_t n;
    while ((n = read(children_[rank].output, buffer, sizeof buffer)) > 0) {
      std::string& text = outcome_.ranks[rank].output;
      if (text.size() < (1u << 20)) text.append(buffer, static_cast<size_t>(n));
    }
    if (n == 0) closeFd(&children_[rank].output);
  }

  void drainChannel(int rank) {
    Child& child = children_[rank];
    char buffer[65536];
    ssize_t n;
    while ((n = read(child.channel, buffer, sizeof buffer)) > 0)
      child.inbox.append(buffer, static_cast<size_t>(n));
    parse(rank);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) closeFd(&child.channel);
  }

  void parse(int rank) {
    Child& child = children_[rank];
    while (child.inbox.size() >= 8) {
      uint32_t header[2];
      memcpy(header, child.inbox.data(), sizeof header);
      if (child.inbox.size() < 8 + static_cast<size_t>(header[1])) return;
      std::string bytes = child.inbox.substr(8, header[1]);
      child.inbox.erase(0, 8 + static_cast<size_t>(header[1]));
      if (static_cast<FrameType>(header[0]) == FrameType::kGather) {
        child.gathering = true;
        child.gather_bytes = std::move(bytes);
        continue;
      }
      const size_t newline = bytes.find('\n');
      outcome_.ranks[rank].reports[bytes.substr(0, newline)] = {bytes.substr(newline + 1),
                                                                secondsSince(start_)};
    }
  }

  // Answers when every rank that can still take part does.
  void answerGather() {
    bool any = false;
    for (const Child& child : children_) {
      if (child.channel >= 0 && !child.gathering) return;
      any = any || child.gathering;
    }
    if (!any) return;
    std::string all;
    for (const Child& child : children_) {
      const uint32_t n = static_cast<uint32_t>(child.gather_bytes.size());
      all.append(reinterpret_cast<const char*>(&n), sizeof n);
      all += child.gather_bytes;
    }
    for (Child& child : children_) {
      child.gather_bytes.clear();
      if (!child.gathering) continue;
      child.gathering = false;
      if (child.channel < 0) continue;
      fcntl(child.channel, F_SETFL, 0);
      sendFrame(child.channel, FrameType::kGathered, all);
      fcntl(child.channel, F_SETFL, O_NONBLOCK);
    }
  }

  void reap(int rank) {
    Child& child = children_[rank];
    if (child.ended) return;
    int status = 0;
    if (waitpid(child.pid, &status, WNOHANG) != child.pid) return;
    child.ended = true;
    if (child.channel >= 0) drainChannel(rank);
    if (child.output >= 0) drainOutput(rank);
    closeFd(&child.channel);
    closeFd(&child.output);
    child.gathering = false;
    RankOutcome& outcome = outcome_.ranks[rank];
    outcome.ended_s = secondsSince(start_);
    if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  }

  void maybeKill() {
    if (options_.kill_rank < 0 || killed_) return;
    for (const RankOutcome& rank : outcome_.ranks) {
      const auto ready = rank.reports.find("ready");
      if (ready == rank.reports.end()) return;
      ready_s_ = std::max(ready_s_, ready->second.at_s);
    }
    if (secondsSince(start_) < ready_s_ + options_.kill_after_s) return;
    killed_ = true;
    Child& victim = children_[options_.kill_rank];
    if (!victim.ended) kill(victim.pid, SIGKILL);
  }

  void dumpAndKill() {
    outcome_.timed_out = true;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      Child& child = children_[rank];
      if (child.ended) continue;
      outcome_.ranks[rank].hung = true;
      outcome_.ranks[rank].output +=
          "--- still alive after " + std::to_string(options_.timeout_s) + " s\n" + threadStates(child.pid);
      kill(child.pid, SIGUSR1);
    }
    const auto asked = Clock::now();
    while (living() > 0 && secondsSince(asked) < 2.0) step();
    for (Child& child : children_) {
      if (!child.ended) kill(child.pid, SIGKILL);
    }
  }

  const std::string program_;
  const LaunchOptions options_;
  const Clock::time_point start_ = Clock::now();
  std::vector<Child> children_;
  LaunchOutcome outcome_;
  double ready_s_ = 0;
  bool killed_ = false;
};

}  // namespace

bool LaunchOutcome::ok() const {
  return !timed_out && std::all_of(ranks.begin(), ranks.end(), [](const RankOutcome& r) { return r.ok(); });
}

std::string LaunchOutcome::describe() const {
  std::ostringstream text;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankOutcome& r = ranks[rank];
    text << "rank " << rank << ": ";
    if (r.hung) {
      text << "hung";
    } else if (r.signal != 0) {
      text << "signal " << r.signal << " (" << strsignal(r.signal) << ")";
    } else {
      text << "exit code " << r.exit_code;
    }
    text << " after " << r.ended_s << " s\n";
    std::istringstream lines(r.output);
    for (std::string line; std::getline(lines, line);) text << "  | " << line << "\n";
  }
  return text.str();
}

LaunchOutcome launchRanks(const std::string& program, const LaunchOptions& options) {
  return Launch(program, options).run();
}

std::string CommandOutcome::describe() const {
  std::ostringstream text;
  if (timed_out) text << "timed out; ";
  text << "exit code " << exit_code << ", signal " << signal << "\nstdout: " << output
       << "\nstderr: " << errors;
  return text.str();
}

CommandOutcome runCommand(const std::vector<std::string>& argv, const CommandOptions& options) {
  const auto start = Clock::now();
  int out[2];
  int err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
    perror("cannot make a pipe");
    abort();
  }
  Environment env = baseEnvironment();
  if (options.preload)
    env["LD_PRELOAD"] = preloadValue(options.library.empty() ? libraryPath() : options.library);
  merge(&env, options.env);
  const pid_t pid = spawn(argv, env, out[1], err[1], {});
  close(out[1]);
  close(err[1]);
  CommandOutcome outcome;
  int open_fds[2] = {out[0], err[0]};
  std::string* texts[2] = {&outcome.output, &outcome.errors};
  while (open_fds[0] >= 0 || open_fds[1] >= 0) {
    pollfd fds[2] = {{open_fds[0], POLLIN, 0}, {open_fds[1], POLLIN, 0}};
    poll(fds, 2, 50);
    for (int i = 0; i < 2; ++i) {
      if (open_fds[i] < 0 || fds[i].revents == 0) continue;
      char buffer[65536];
      const ssize_t n = read(open_fds[i], buffer, sizeof buffer);
      if (n > 0) texts[i]->append(buffer, static_cast<size_t>(n));
      if (n == 0) closeFd(&open_fds[i]);
    }
    if (secondsSince(start) > options.timeout_s && !outcome.timed_out) {
      outcome.timed_out = true;
      outcome.errors += threadStates(pid);
      kill(pid, SIGKILL);
    }
    // A grandchild that outlives a killed command may hold the pipes: do not wait for it.
    if (outcome.timed_out && secondsSince(start) > options.timeout_s + 2) break;
  }
  closeFd(&open_fds[0]);
  closeFd(&open_fds[1]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

std::string libraryPath() {
  if (const char* path = getenv("HALFWIRE_TEST_LIBRARY"); path != nullptr && *path != '\0') return path;
#ifdef HALFWIRE_LIBRARY_PATH
  return HALFWIRE_LIBRARY_PATH;
#else
  return "";
#endif
}

std::string preloadValue(const std::string& library) {
  const std::string runtime = HALFWIRE_SANITIZER_RUNTIME;
  if (runtime.empty()) return library;
  return library.empty() ? runtime : runtime + ":" + library;
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "halfwire-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    perror("cannot make a temporary directory");
    abort();
  }
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace halfwire::testing
