#!/usr/bin/env bash
# Builds the two programs of this folder for one GPU architecture, beside the tree's own binaries. They need nvcc and
# NCCL's header and library, nothing else. Usage: bench/two_gpu/build.sh BIN_DIR [sm_90]
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${1:?usage: bench/two_gpu/build.sh BIN_DIR [ARCHITECTURE]}
arch=${2:-sm_90}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
mkdir -p "$bin"
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
# No contraction: the bits of a packet are part of the format.
flags=(-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch="$arch" -Isrc -Ibench/two_gpu --cudart static)
for name in wire/cuda_codec wire/reference; do
  g++ -std=c++20 -O2 -ffp-contract=off -Isrc -c "src/$name.cc" -o "$objects/$(basename "$name").o"
done
for program in collectives host_transport; do
  [ -z "${ONLY:-}" ] || [ "$ONLY" = "$program" ] || continue
  "$nvcc" "${flags[@]}" "bench/two_gpu/$program.cu" "$objects/cuda_codec.o" "$objects/reference.o" \
    -Xcompiler -static-libstdc++,-static-libgcc -lnccl -lpthread -ldl -lrt -o "$bin/two-gpu-${program//_/-}"
  strip "$bin/two-gpu-${program//_/-}"
done
