#include "launch/progress.h"

#include <fmt/format.h>

#include <algorithm>

namespace halfwire {

std::string progressBar(uint64_t done, uint64_t total, const std::string& words, int width) {
  const double part =
      total == 0 ? 1.0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const int full = static_cast<int>(part * width);
  const std::string count = std::to_string(total);
  return fmt::format("[{}{}] {:>{}}/{}  {}", std::string(full, '#'), std::string(width - full, '-'), done,
                     count.size(), count, words);
}

bool progressLineDue(uint64_t done, uint64_t total, int lines) {
  if (done == 0) return false;
  if (done == total) return true;
  const uint64_t n = static_cast<uint64_t>(lines);
  return done * n / total != (done - 1) * n / total;
}

}  // namespace halfwire
