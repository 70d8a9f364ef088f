#include "trace/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "trace/nsys_reader.h"

namespace halfwire::trace {
namespace {

namespace fs = std::filesystem;

bool endsWith(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() && std::string_view(text).substr(text.size() - suffix.size()) == suffix;
}

// rank2 before rank10.
bool naturalLess(const std::string& a, const std::string& b) {
  size_t i = 0;
  size_t k = 0;
  const auto digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  while (i < a.size() && k < b.size()) {
    if (digit(a[i]) && digit(b[k])) {
      const size_t ai = i;
      const size_t bk = k;
      while (i < a.size() && digit(a[i])) ++i;
      while (k < b.size() && digit(b[k])) ++k;
      std::string_view x = std::string_view(a).substr(ai, i - ai);
      std::string_view y = std::string_view(b).substr(bk, k - bk);
      while (x.size() > 1 && x.front() == '0') x.remove_prefix(1);
      while (y.size() > 1 && y.front() == '0') y.remove_prefix(1);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a[i] != b[k]) return a[i] < b[k];
      ++i;
      ++k;
    }
  }
  return a.size() - i < b.size() - k;
}

}  // namespace

Result<std::vector<std::string>> expandInputs(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      if (!fs::exists(path, error)) {
        return Status(StatusCode::kInvalidData, fmt::format("{}: there is no such file or folder", path));
      }
      files.push_back(path);
      continue;
    }
    std::vector<std::string> found;
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().string();
      if (endsWith(name, ".json") || endsWith(name, ".json.gz") || endsWith(name, ".sqlite"))
        found.push_back(name);
    }
    if (error)
      return Status(StatusCode::kInvalidData, fmt::format("{}: cannot be listed: {}", path, error.message()));
    if (found.empty()) {
      return Status(StatusCode::kInvalidData,
                    fmt::format("{}: the folder holds no trace (.json, .json.gz or .sqlite)", path));
    }
    std::sort(found.begin(), found.end(), naturalLess);
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

Result<Timeline> readTrace(const std::string& path, const CommPatterns& patterns,
                           const ReadOptions& options) {
  char head[16] = {};
  {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
    if (file != nullptr && std::fread(head, 1, sizeof(head), file.get()) < sizeof(head)) head[15] = 1;
  }
  if (std::memcmp(head, "SQLite format 3", 16) == 0) return readNsys(path, patterns, options);
  if (endsWith(path, ".nsys-rep") || endsWith(path, ".qdrep")) {
    return Status(
        StatusCode::kInvalidData,
        fmt::format("{}: Nsight Systems reports are read after: nsys export --type sqlite {}", path, path));
  }
  Result<std::unique_ptr<ByteSource>> source = openFile(path);
  if (!source.ok()) return source.status();
  return readKineto(*source.value(), path, patterns, options);
}

}  // namespace halfwire::trace
