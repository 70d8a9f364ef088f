#!/usr/bin/env bash
# Runs the CPU test suite through CTest. Further arguments go to ctest (`-L quick`, `-R name`).
set -euo pipefail
cd "$(dirname "$0")/.."
exec ctest --preset "${PRESET:-release}" -j"$(nproc)" "$@"
