// What the HTML reports have in common: one look, a few functions of script, and how a report's data get into
// a page. A page is one self-contained file: no network, no other files.
#pragma once

#include <string>
#include <string_view>

namespace halfwire {

// `page` with the common style where it says /*HALFWIRE-STYLE*/, the common script where it says
// /*HALFWIRE-SCRIPT*/ and the text `json` where it says /*HALFWIRE-DATA*/. The data may hold anything: no "<"
// of theirs is left that could end the element they are in.
std::string fillPage(std::string_view page, std::string_view json);

}  // namespace halfwire
