#!/usr/bin/env bash
# Everything that needs a GPU, in one go: kernels against the reference, kernel timings, PyTorch over the wire with
# several ranks on one GPU. For machines that have a GPU but not this tree's build tools: build elsewhere and copy
# build/<preset>/bin and lib. Usage: scripts/gpu_check.sh BUILD_DIR RESULTS_DIR PART...
#   parts: kernels codec timings sanitizer numbers streams smoke train collective overlap cpu
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:?usage: scripts/gpu_check.sh BUILD_DIR RESULTS_DIR PART...}
results=${2:?usage: scripts/gpu_check.sh BUILD_DIR RESULTS_DIR PART...}
shift 2
build=$(cd "$build" && pwd)
mkdir -p "$results"
# PyTorch's wheels bring NCCL in a folder of their own.
nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null || true)
export LD_LIBRARY_PATH=$build/lib:$nccl:${LD_LIBRARY_PATH:-}
halfwire=$build/bin/halfwire
shared=examples/pytorch/shared_gpu.sh
failed=0

# Runs one step with a time limit, keeps its output, and goes on after a failure.
step() {
  local name=$1 limit=$2
  shift 2
  local begin=$SECONDS rc=0
  timeout -k 10 "$limit" "$@" >"$results/$name.log" 2>&1 || rc=$?
  echo "== $name: rc $rc, $((SECONDS - begin)) s"
  tail -n "${LINES_SHOWN:-6}" "$results/$name.log"
  [ "$rc" -eq 0 ] || failed=1
}

for part in "$@"; do
  case $part in
    kernels) step kernels 240 "$build/bin/halfwire-cuda-check" --check ;;
    # The host codec with what this machine's processor has (AVX-512, where the build machine has less).
    cpu)
      LINES_SHOWN=3 step cpu-tests 300 "$build/tests/wire_test" --gtest_filter=-*Golden*
      LINES_SHOWN=20 step cpu-codec 120 "$halfwire" bench codec ;;
    codec) LINES_SHOWN=40 step codec 240 "$halfwire" bench codec --device cuda ;;
    timings) LINES_SHOWN=60 step timings 240 "$build/bin/halfwire-cuda-check" --measure --out "$results" ;;
    sanitizer)
      for tool in memcheck racecheck initcheck; do
        LINES_SHOWN=3 step "sanitizer-$tool" 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
          "$build/bin/halfwire-cuda-check" --check --small
      done ;;
    numbers)
      for n in 2 4; do
        LINES_SHOWN=12 step "numbers-$n" 120 "$shared" "$halfwire" run --mode wire --min-bytes 0 -n "$n" -- \
          python3 tests/gpu/bad_numbers.py --share-gpu
      done ;;
    # The third run cuts every message into passes that overlap, on two streams of the library's own and the program's.
    streams)
      for n in 2 4; do
        LINES_SHOWN=4 step "streams-$n" 120 "$shared" "$halfwire" run --mode wire --min-bytes 0 -n "$n" -- \
          python3 tests/gpu/streams.py --share-gpu
      done
      LINES_SHOWN=4 step streams-overlap 120 "$shared" "$halfwire" run --mode wire --min-bytes 0 --overlap on \
        --chunk-bytes 1MiB -n 4 -- python3 tests/gpu/streams.py --share-gpu
      if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
        LINES_SHOWN=4 step streams-one-process 120 "$halfwire" run --mode wire --comms all --min-bytes 0 -- \
          python3 tests/gpu/streams.py --one-process
      fi ;;
    smoke)
      LINES_SHOWN=25 step smoke 120 "$shared" "$halfwire" run --mode wire -n 2 -- \
        python3 examples/pytorch/gpt.py --share-gpu --steps 20 ;;
    train)
      for run in exact-1 exact-1b exact-2 wire-1; do
        seed=${run#*-}; seed=${seed%b}
        mode=off; [ "${run%%-*}" = wire ] && mode=wire
        LINES_SHOWN=12 step "train-$run" 200 "$shared" "$halfwire" run --mode "$mode" -n 4 -- \
          python3 examples/pytorch/gpt.py --share-gpu --steps 200 --seed "$seed" --json "$results/train-$run.json"
      done
      for n in 2 8; do
        LINES_SHOWN=12 step "train-$n-ranks" 200 "$shared" "$halfwire" run --mode wire -n "$n" -- \
          python3 examples/pytorch/gpt.py --share-gpu --steps 20 --json "$results/train-$n.json"
      done ;;
    collective)
      for n in 2 4 8; do
        LINES_SHOWN=1 step "collective-$n" 200 "$shared" "$halfwire" bench collective --engine nccl --share-gpu -n "$n" \
          --bytes 1MiB,4MiB,16MiB,64MiB --repeat 30 --json
        cp "$results/collective-$n.log" "$results/collective-$n.json"
        python3 scripts/collective_table.py "$results/collective-$n.json"
      done ;;
    # Whether overlapping passes helps where the codec is fast.
    overlap)
      for overlap in off on; do
        LINES_SHOWN=1 step "overlap-$overlap" 200 "$shared" "$halfwire" bench collective --engine nccl --share-gpu -n 4 \
          --bytes 16MiB,64MiB,256MiB --repeat 15 --overlap "$overlap" --json
        python3 scripts/collective_table.py "$results/overlap-$overlap.log"
      done ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
exit $failed
