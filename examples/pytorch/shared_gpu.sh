#!/usr/bin/env bash
# Runs a command with the CUDA MPS daemon, so that several ranks on one GPU really run side by side. Starts a daemon of
# its own and stops it afterwards. Usage:
#   examples/pytorch/shared_gpu.sh halfwire run --mode wire -n 4 -- python3 examples/pytorch/gpt.py --share-gpu
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
command -v nvidia-cuda-mps-control >/dev/null || { echo "nvidia-cuda-mps-control is not on PATH: it comes with the NVIDIA driver" >&2; exit 2; }

folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true; rm -rf "$folder"' EXIT
"$@"
