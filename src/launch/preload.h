// Getting libhalfwire.so into other programs: where it is, whether it loads, and what LD_PRELOAD becomes.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace halfwire {

// libhalfwire.so of the build or installation that this program belongs to: ../lib beside its own folder.
Result<std::string> findPreloadLibrary();

// The exposure meter's library beside it, which is preloaded as well where the meter is on.
Result<std::string> findMeterLibrary();

// `existing` with `library` after it: what was preloaded before stays in front. The loader splits the value
// at spaces and colons, so a path that holds one is refused. `runtime`, if not empty, goes first (a
// sanitizer's runtime).
Result<std::string> preloadValue(const std::string& existing, const std::string& library,
                                 const std::string& runtime);

// Starts this program once more with the given environment (LD_PRELOAD set) and asks it whether the library
// is there. An error says why the loader refuses it. `main` must call preloadProbe first thing.
Status checkPreload(const std::vector<std::string>& environment, const std::string& library);

// What the second start does: true if this is one, and then `*exit_code` is its result.
bool preloadProbe(int argc, char** argv, int* exit_code);

}  // namespace halfwire
