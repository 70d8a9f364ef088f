#include "trace/json_repair.h"

#include <algorithm>
#include <cctype>

namespace halfwire::trace {
namespace {

bool isSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

size_t skipSpace(std::string_view s, size_t i) {
  while (i < s.size() && isSpace(s[i])) ++i;
  return i;
}

// Bytes of the UTF-8 sequence at `i`, 0 if there is none.
size_t utf8Length(std::string_view s, size_t i) {
  const auto at = [&](size_t k) { return k < s.size() ? static_cast<unsigned char>(s[k]) : 0U; };
  const unsigned a = at(i);
  const auto tail = [&](size_t k) { return (at(k) & 0xC0U) == 0x80U; };
  if (a < 0x80) return 1;
  if (a >= 0xC2 && a <= 0xDF) return tail(i + 1) ? 2 : 0;
  if (a >= 0xE0 && a <= 0xEF) {
    if (!tail(i + 1) || !tail(i + 2)) return 0;
    if (a == 0xE0 && at(i + 1) < 0xA0) return 0;
    if (a == 0xED && at(i + 1) > 0x9F) return 0;
    return 3;
  }
  if (a >= 0xF0 && a <= 0xF4) {
    if (!tail(i + 1) || !tail(i + 2) || !tail(i + 3)) return 0;
    if (a == 0xF0 && at(i + 1) < 0x90) return 0;
    if (a == 0xF4 && at(i + 1) > 0x8F) return 0;
    return 4;
  }
  return 0;
}

bool startsValue(std::string_view s, size_t i) {
  i = skipSpace(s, i);
  if (i >= s.size()) return true;
  const char c = s[i];
  if (c == '"' || c == '{' || c == '[' || c == '-' || std::isdigit(static_cast<unsigned char>(c)))
    return true;
  for (std::string_view word : {"true", "false", "null", "NaN", "nan", "Infinity"}) {
    if (s.substr(i, word.size()) == word) return true;
  }
  return false;
}

// Is the quote at `i` the end of its string? What follows decides: inside a name it is followed by anything.
bool endsString(std::string_view s, size_t i, bool key) {
  size_t next = skipSpace(s, i + 1);
  if (next >= s.size()) return true;
  const char c = s[next];
  if (key) return c == ':';
  if (c == '}' || c == ']') return true;
  if (c != ',') return false;
  if (startsValue(s, next + 1)) return true;
  // A key without its opening quote follows: tid": 0
  next = skipSpace(s, next + 1);
  const size_t quote = s.substr(0, std::min(s.size(), next + 64)).find('"', next);
  if (quote == std::string_view::npos) return false;
  const size_t colon = skipSpace(s, quote + 1);
  return colon < s.size() && s[colon] == ':';
}

class Repairer {
 public:
  Repairer(std::string_view input, int64_t event_depth, bool final)
      : in_(input), event_depth_(event_depth), final_(final) {}

  RepairedJson run() {
    out_.text.reserve(in_.size() + 64);
    size_t event_text = 0;
    size_t i = 0;
    while (i < in_.size()) {
      const char c = in_[i];
      if (c == '"') {
        out_.text += '"';
        i = string(i + 1);
      } else if (c == '{' || c == '[') {
        ++out_.depth;
        objects_.push_back(c == '{');
        key_ = c == '{';
        out_.text += c;
        ++i;
      } else if (c == '}' || c == ']') {
        --out_.depth;
        if (!objects_.empty()) objects_.pop_back();
        out_.text += c;
        ++i;
        if (c == '}' && out_.depth == event_depth_) {
          out_.found_event = true;
          out_.end = i;
          event_text = out_.text.size();
        }
      } else if (c == ',' || c == ':' || isSpace(c)) {
        if (c == ':') key_ = false;
        // Above where the input began there can only be the trace's own object.
        if (c == ',') key_ = objects_.empty() ? out_.depth < 0 : objects_.back();
        out_.text += c;
        ++i;
      } else {
        i = word(i);
      }
    }
    if (final_) {
      out_.end = in_.size();
    } else {
      out_.text.resize(event_text);
    }
    return std::move(out_);
  }

 private:
  void edited(size_t input_offset) {
    ++out_.changes;
    out_.edits.emplace_back(out_.text.size(), input_offset);
  }

  // From after the opening quote to after the closing one.
  size_t string(size_t i) {
    while (i < in_.size()) {
      const auto c = static_cast<unsigned char>(in_[i]);
      if (c == '"') {
        if (endsString(in_, i, key_)) {
          out_.text += '"';
          return i + 1;
        }
        out_.text += "\\\"";
        ++out_.bad_quotes;
        edited(++i);
      } else if (c == '\\') {
        i = escape(i);
      } else if (c < 0x20) {
        out_.text += ' ';
        ++out_.bad_bytes;
        edited(++i);
      } else if (c < 0x80) {
        out_.text += static_cast<char>(c);
        ++i;
      } else if (const size_t n = utf8Length(in_, i); n > 0) {
        out_.text.append(in_.substr(i, n));
        i += n;
      } else {
        out_.text += '?';
        ++out_.bad_bytes;
        edited(++i);
      }
    }
    out_.inside_string = true;
    return i;
  }

  size_t escape(size_t i) {
    const char next = i + 1 < in_.size() ? in_[i + 1] : '\0';
    bool good = next != '\0' && std::string_view("\"\\/bfnrt").find(next) != std::string_view::npos;
    if (next == 'u' && i + 5 < in_.size()) {
      good = std::all_of(in_.begin() + static_cast<std::ptrdiff_t>(i) + 2,
                         in_.begin() + static_cast<std::ptrdiff_t>(i) + 6,
                         [](unsigned char c) { return std::isxdigit(c) != 0; });
    }
    if (good) {
      out_.text.append(in_.substr(i, 2));
      return i + 2;
    }
    out_.text += "\\\\";
    ++out_.bad_escapes;
    edited(i + 1);
    return i + 1;
  }

  // Something outside strings: a number, a literal, or a word whose quotes were lost.
  size_t word(size_t i) {
    size_t end = i;
    while (end < in_.size() && std::string_view("\",:{}[]\n").find(in_[end]) == std::string_view::npos) ++end;
    const bool closes = end < in_.size() && in_[end] == '"';
    size_t last = end;
    while (last > i && isSpace(in_[last - 1])) --last;
    const std::string_view text = in_.substr(i, last - i);
    if (closes) {  // tid": 0
      ++out_.bad_quotes;
      quoted(text);
      edited(end + 1);
      return end + 1;
    }
    const bool number = std::all_of(text.begin(), text.end(), [](char c) {
      return std::string_view("0123456789+-.eE").find(c) != std::string_view::npos;
    });
    if (number || text == "true" || text == "false" || text == "null") {
      out_.text.append(in_.substr(i, end - i));
      return end;
    }
    ++out_.bare_words;
    if (text == "NaN" || text == "nan" || text == "-nan" || text == "Infinity" || text == "-Infinity" ||
        text == "inf" || text == "-inf") {
      out_.text += "null";
    } else {
      quoted(text);
    }
    edited(end);
    return end;
  }

  void quoted(std::string_view text) {
    out_.text += '"';
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      out_.text += byte < 0x20 || byte >= 0x80 || c == '\\' ? '?' : c;
    }
    out_.text += '"';
  }

  std::string_view in_;
  int64_t event_depth_;
  bool final_;
  bool key_ = false;  // the next string is a key
  std::vector<bool> objects_;
  RepairedJson out_;
};

}  // namespace

size_t RepairedJson::original(size_t text_offset) const {
  auto it =
      std::upper_bound(edits.begin(), edits.end(), text_offset,
                       [](size_t offset, const std::pair<size_t, size_t>& e) { return offset < e.first; });
  if (it == edits.begin()) return text_offset;
  --it;
  return it->second + (text_offset - it->first);
}

RepairedJson repairJson(std::string_view input, int64_t event_depth, bool final) {
  return Repairer(input, event_depth, final).run();
}

}  // namespace halfwire::trace
