// Runs a test's body in a child process, for libraries that read the environment once and start threads.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace halfwire::testing {

using Environment = std::vector<std::pair<std::string, std::string>>;

// True if `body` ended without a failed expectation within `seconds`. The caller must have no threads.
inline bool runIsolated(const Environment& environment, const std::function<void()>& body,
                        unsigned seconds = 20) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    body();
    std::fflush(nullptr);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return false;
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "the isolated test ended by signal %d%s\n", WTERMSIG(status),
                 WTERMSIG(status) == SIGALRM ? " (it hung)" : "");
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace halfwire::testing
