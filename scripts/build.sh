#!/usr/bin/env bash
# Configures and builds. `demo` builds what the demonstration runs and nothing else (no CUDA, no tests);
# `test` builds everything. Usage: [PRESET=release] [CMAKE_ARGS=...] scripts/build.sh demo|test
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?usage: scripts/build.sh demo|test}
preset=${PRESET:-release}
dir=build/$preset
# Marks a tree that was configured for the demonstration: it has neither tests nor CUDA.
mark=$dir/demo-only

if [ "$what" = test ]; then
  cuda=()
  if [ -f "$mark" ]; then cuda=(-DHALFWIRE_CUDA=AUTO); fi
  cmake --preset "$preset" -DHALFWIRE_TESTS=ON "${cuda[@]}" ${CMAKE_ARGS:-} >/dev/null
  rm -f "$mark"
  exec cmake --build "$dir"
fi
# A tree that is configured for tests keeps its settings; only the demonstration's targets are built.
if [ ! -f "$dir/CMakeCache.txt" ]; then
  mkdir -p "$dir"
  touch "$mark"
  cmake --preset "$preset" -DHALFWIRE_TESTS=OFF -DHALFWIRE_CUDA=OFF ${CMAKE_ARGS:-} >/dev/null
fi
exec cmake --build "$dir" --target halfwire halfwire_cli hostrt hostccl train_lm train_lm_compare
