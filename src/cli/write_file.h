// Writes a file whole or not at all: under a name of its own first.
#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/status.h"

namespace halfwire::cli {

// `write` gets the open file and says how it went. The error names the path.
template <class Write>
Status writeFile(const std::string& path, Write write) {
  const std::string part = path + ".part";
  const auto problem = [&](const char* what) {
    return Status(StatusCode::kUnavailable, fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
  };
  std::FILE* file = std::fopen(part.c_str(), "wb");
  if (file == nullptr) return problem("cannot be created");
  Status status = write(file);
  if (std::fclose(file) != 0 && status.ok()) status = problem("cannot be written");
  if (status.ok() && std::rename(part.c_str(), path.c_str()) != 0) status = problem("cannot be put in place");
  if (!status.ok()) std::remove(part.c_str());
  return status;
}

inline Status writeFile(const std::string& path, const std::string& text) {
  return writeFile(path, [&](std::FILE* file) {
    if (std::fwrite(text.data(), 1, text.size(), file) == text.size()) return Status();
    return Status(StatusCode::kUnavailable,
                  fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
  });
}

}  // namespace halfwire::cli
