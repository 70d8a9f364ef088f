// A folder that is gone, with all it holds, when its owner is.
#pragma once

#include <fmt/format.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace halfwire::cli {

class TemporaryFolder {
 public:
  // Below TMPDIR, else /tmp; `purpose` is part of its name. The path is empty if it could not be made.
  explicit TemporaryFolder(const char* purpose) {
    const char* parent = std::getenv("TMPDIR");
    path_ =
        fmt::format("{}/halfwire-{}-XXXXXX", parent != nullptr && *parent != '\0' ? parent : "/tmp", purpose);
    if (mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace halfwire::cli
