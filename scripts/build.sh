#!/usr/bin/env bash
# Configures and builds. `demo` builds what the demonstration runs and nothing else (no CUDA, no tests);
# `test` builds everything. Usage: [PRESET=release] scripts/build.sh demo|test
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?usage: scripts/build.sh demo|test}
preset=${PRESET:-release}
dir=build/$preset

if [ "$what" = test ]; then
  cmake --preset "$preset" -DHALFWIRE_TESTS=ON ${CMAKE_ARGS:-} >/dev/null
  cmake --build "$dir"
  exit 0
fi
# A tree that is configured for tests keeps its settings; only the demonstration's targets are built.
[ -f "$dir/CMakeCache.txt" ] || cmake --preset "$preset" -DHALFWIRE_TESTS=OFF -DHALFWIRE_CUDA=OFF ${CMAKE_ARGS:-} >/dev/null
cmake --build "$dir" --target halfwire halfwire_cli hostrt hostccl train_lm
