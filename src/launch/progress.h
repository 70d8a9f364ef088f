// A progress bar as text; who prints it decides where.
#pragma once

#include <cstdint>
#include <string>

namespace halfwire {

// "[#########-----------]  45/100  words", `width` characters for the bar itself. `done` may exceed `total`.
std::string progressBar(uint64_t done, uint64_t total, const std::string& words, int width = 24);

// Whether a plain log (no terminal) should get a line for item `done` of `total`: about `lines` of them, and
// the last.
bool progressLineDue(uint64_t done, uint64_t total, int lines = 10);

}  // namespace halfwire
