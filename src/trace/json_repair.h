// Mends the damage that real recorders leave in their JSON, so that a JSON parser can read the rest:
// unescaped quotes and line ends in names, bad escapes, missing quotes, bare words, control characters, bytes
// that are not UTF-8. Also finds where whole events end, string by string, when that cannot be told from the
// bytes around a cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace halfwire::trace {

struct RepairedJson {
  std::string text;   // of input[0, end)
  size_t end = 0;     // where the last whole event ends in the input; input.size() when the input is final
  int64_t depth = 0;  // brackets open after all of the input
  bool inside_string = false;  // the input ends within a string
  bool found_event = false;
  uint64_t changes = 0;
  uint64_t bad_bytes = 0;    // not UTF-8, or control characters
  uint64_t bad_escapes = 0;  // backslashes that start no escape
  uint64_t bad_quotes = 0;   // quotes missing, or inside a string
  uint64_t bare_words = 0;
  std::vector<std::pair<size_t, size_t>> edits;  // offsets (in text, in input) after which both run in step

  // The input offset of a text offset.
  size_t original(size_t text_offset) const;
};

// `event_depth`: brackets open around an event. `final`: no bytes follow the input.
RepairedJson repairJson(std::string_view input, int64_t event_depth, bool final);

}  // namespace halfwire::trace
