#include "page/page.h"

namespace halfwire {

// Generated from page.css and page.js.
extern const char* const kPageStyle;
extern const char* const kPageScript;

namespace {

// `text` with the first `mark`, if there is one, replaced.
void put(std::string* text, std::string_view mark, std::string_view with) {
  const size_t at = text->find(mark);
  if (at != std::string::npos) text->replace(at, mark.size(), with);
}

}  // namespace

std::string fillPage(std::string_view page, std::string_view json) {
  std::string out(page);
  put(&out, "/*HALFWIRE-STYLE*/", kPageStyle);
  put(&out, "/*HALFWIRE-SCRIPT*/", kPageScript);
  // Within a script element only "</script" and "<!--" mean anything, and in JSON "<" stands in strings
  // alone.
  std::string safe;
  safe.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  put(&out, "/*HALFWIRE-DATA*/", safe);
  return out;
}

}  // namespace halfwire
