#include "corpus.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace train_lm {
namespace {

namespace fs = std::filesystem;

void append(const fs::path& path, uint64_t most, std::string* text) {
  std::ifstream in(path, std::ios::binary);
  std::string chunk(1 << 16, '\0');
  while (in && text->size() < most) {
    in.read(chunk.data(),
            static_cast<std::streamsize>(std::min<uint64_t>(chunk.size(), most - text->size())));
    text->append(chunk.data(), static_cast<size_t>(in.gcount()));
  }
}

// /usr/share/cmake-3.25/Help or its like; the newest if there are several.
fs::path cmakeManual() {
  std::error_code error;
  fs::path found;
  for (const auto& entry : fs::directory_iterator("/usr/share", error)) {
    const fs::path help = entry.path() / "Help";
    if (entry.path().filename().string().starts_with("cmake-") && fs::is_directory(help, error))
      found = std::max(found, help);
  }
  return found;
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

std::string readCorpus(const std::string& given, uint64_t least, uint64_t most, std::string* error) {
  const fs::path path = given.empty() ? cmakeManual() : fs::path(given);
  if (path.empty()) {
    *error = "CMake's manual is not below /usr/share: install the package cmake-data or give --text FILE";
    return "";
  }
  std::string text;
  std::error_code code;
  if (fs::is_directory(path, code)) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(path, code)) {
      const std::string extension = entry.path().extension();
      if (entry.is_regular_file(code) && (extension == ".rst" || extension == ".txt"))
        files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) append(file, most, &text);
  } else {
    append(path, most, &text);
  }
  if (text.size() < least) {
    *error = path.string() + " holds " + std::to_string(text.size()) + " bytes of text, training needs " +
             std::to_string(least) + ": give --text another file or folder";
  }
  return text;
}

uint64_t samplePosition(uint64_t seed, uint64_t rank, uint64_t step, uint64_t sample, uint64_t range) {
  return mix(mix(mix(mix(seed) ^ rank) ^ step) ^ sample) % range;
}

}  // namespace train_lm
