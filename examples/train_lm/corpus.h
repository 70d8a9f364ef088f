// Real text that is on every machine that can build this: the reference manual of CMake, or files of your
// own.
#pragma once

#include <cstdint>
#include <string>

namespace train_lm {

// The text of a file, or of all .rst and .txt files below a folder in the order of their paths, up to `most`
// bytes. An empty path means CMake's manual. On failure returns less than `least` bytes and says why in
// `error`.
std::string readCorpus(const std::string& path, uint64_t least, uint64_t most, std::string* error);

// A position in [0, range) for one sample: a function of its arguments alone.
uint64_t samplePosition(uint64_t seed, uint64_t rank, uint64_t step, uint64_t sample, uint64_t range);

}  // namespace train_lm
