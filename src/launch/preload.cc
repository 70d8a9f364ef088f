#include "launch/preload.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

namespace halfwire {
namespace {

constexpr char kProbe[] = "--preload-probe";
constexpr char kMarker[] = "halfwire-probe:loaded";

std::string ownPath() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

// Runs a program to its end and returns what it wrote to both outputs; empty if it does not start or hangs.
std::string output(const std::vector<std::string>& command, const std::vector<std::string>& environment) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return "";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, fds[1], 1);
  posix_spawn_file_actions_adddup2(&actions, fds[1], 2);
  std::vector<char*> argv, envp;
  for (const std::string& s : command) argv.push_back(const_cast<char*>(s.c_str()));
  for (const std::string& s : environment) envp.push_back(const_cast<char*>(s.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  close(fds[1]);
  std::string text;
  if (error == 0) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (;;) {
      pollfd waiting{fds[0], POLLIN, 0};
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
              .count();
      if (left <= 0) break;
      if (poll(&waiting, 1, static_cast<int>(left)) < 0 && errno != EINTR) break;
      if (waiting.revents == 0) continue;
      char buffer[4096];
      const ssize_t n = read(fds[0], buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      if (text.size() < 65536) text.append(buffer, static_cast<size_t>(n));
    }
    kill(pid, SIGKILL);  // it is done, or it hangs
    waitpid(pid, nullptr, 0);
  }
  close(fds[0]);
  return text;
}

// The loader's own line about our library, without what precedes the reason.
std::string loaderWords(const std::string& text, const std::string& library) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    if (line.find(library) != std::string::npos) return line;
    begin = end + 1;
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace

Result<std::string> findPreloadLibrary() {
  const std::filesystem::path own = ownPath();
  const std::filesystem::path library =
      (own.parent_path().parent_path() / "lib" / "libhalfwire.so").lexically_normal();
  if (access(library.c_str(), R_OK) == 0) return library.string();
  return Status(
      StatusCode::kUnavailable,
      fmt::format(
          "cannot read {} ({}): build it (`scripts/build.sh demo`) or keep bin and lib of one build together",
          library.string(), std::strerror(errno)));
}

Result<std::string> findMeterLibrary() {
  const auto library = findPreloadLibrary();
  if (!library.ok()) return library;
  const std::string meter =
      (std::filesystem::path(library.value()).parent_path() / "libhalfwire-meter.so").string();
  if (access(meter.c_str(), R_OK) == 0) return meter;
  return Status(StatusCode::kUnavailable,
                fmt::format("cannot read {} ({}): build it or keep both libraries of one build together",
                            meter, std::strerror(errno)));
}

Result<std::string> preloadValue(const std::string& existing, const std::string& library,
                                 const std::string& runtime) {
  if (library.find_first_of(": ") != std::string::npos) {
    return Status(
        StatusCode::kUnavailable,
        fmt::format(
            "'{}' cannot be preloaded because LD_PRELOAD splits at spaces and colons: move Halfwire to a "
            "folder whose path has none",
            library));
  }
  std::string value = runtime;
  for (const std::string& part : {existing, library}) {
    if (part.empty()) continue;
    if (!value.empty()) value += ':';
    value += part;
  }
  return value;
}

Status checkPreload(const std::vector<std::string>& environment, const std::string& library) {
  const std::string text = output({ownPath(), kProbe}, environment);
  if (text.find(kMarker) != std::string::npos) return {};
  const auto fails = [&](std::string_view what) {
    return Status(StatusCode::kUnavailable, fmt::format("the loader refuses {}: {}", library, what));
  };
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (says("version `GLIBC") || says("_dl_find_object")) {
    return fails(
        "this machine's C library is older than it needs (glibc 2.35): build Halfwire on this machine");
  }
  if (says("wrong ELF class") || says("invalid ELF header") || says("wrong architecture")) {
    return fails("it is no library for this kind of processor: build Halfwire on this machine");
  }
  if (says("failed to map segment")) {
    return fails("its file system forbids programs (mounted noexec): copy Halfwire to one that does not");
  }
  if (text.empty()) return fails("a program that preloads it ends at once or hangs: build Halfwire again");
  return fails(fmt::format("\"{}\": build Halfwire again on this machine", loaderWords(text, library)));
}

bool preloadProbe(int argc, char** argv, int* exit_code) {
  if (argc != 2 || std::strcmp(argv[1], kProbe) != 0) return false;
  const bool loaded = dlsym(RTLD_DEFAULT, "halfwire_version") != nullptr;
  *exit_code = loaded ? 0 : 3;
  if (!loaded) return true;
  const ssize_t written = write(1, kMarker, sizeof kMarker - 1);
  if (written < 0) *exit_code = 3;
  return true;
}

}  // namespace halfwire
