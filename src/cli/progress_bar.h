// How far a command has come with the files it reads.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace halfwire::cli {

// A bar on a terminal's standard error, for work that takes longer than half a second; nothing elsewhere.
class ProgressBar {
 public:
  ~ProgressBar() { clear(); }
  // `done` of `total` bytes of this file.
  void update(const std::string& file, uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (!terminal_ || total == 0 || now - started_ < std::chrono::milliseconds(500) ||
        now - last_ < std::chrono::milliseconds(100)) {
      return;
    }
    last_ = now;
    const double part = static_cast<double>(std::min(done, total)) / static_cast<double>(total);
    fmt::print(stderr, "\r\033[K[{:<30}] {:3.0f} % {}", std::string(static_cast<size_t>(30 * part), '#'),
               100 * part, file.substr(file.rfind('/') + 1).substr(0, 40));
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) fmt::print(stderr, "\r\033[K");
    shown_ = false;
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_ = started_;
};

}  // namespace halfwire::cli
