// For tests: a folder of its own, and runs of the `halfwire` command in it.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace halfwire {

inline std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

struct Ran {
  int code = 0;
  std::string out, err;
  uint64_t peak_bytes = 0;
  double seconds = 0;
};

class CommandTest : public ::testing::Test {
 protected:
  explicit CommandTest(const char* subcommand) : subcommand_(subcommand) {}

  void SetUp() override {
    root_ =
        std::filesystem::temp_directory_path() / fmt::format("halfwire-{}-test-{}", subcommand_, ::getpid());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // Runs in the test's folder: paths that a report shows are relative to it where they were given so.
  Ran halfwire(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {HALFWIRE_COMMAND, subcommand_});
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    const std::string out = root_ / "out", err = root_ / "err";
    const auto start = std::chrono::steady_clock::now();
    const pid_t pid = fork();
    if (pid == 0) {
      if (::chdir(root_.c_str()) != 0 || std::freopen(out.c_str(), "w", stdout) == nullptr ||
          std::freopen(err.c_str(), "w", stderr) == nullptr) {
        _exit(99);
      }
      execv(argv[0], argv.data());
      _exit(99);
    }
    int status = 0;
    rusage usage{};
    wait4(pid, &status, 0, &usage);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(out), contents(err),
            static_cast<uint64_t>(usage.ru_maxrss) * 1024,
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  }

  std::filesystem::path root_;

 private:
  const char* subcommand_;
};

}  // namespace halfwire
