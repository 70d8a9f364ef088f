#!/usr/bin/env bash
# Trains examples/pytorch/gpt.py on four ranks that share one GPU, exactly, over the compressed wire, and exactly with noise
# of one bf16 ulp (twins of the exact runs), and records every run for `halfwire parity`. Can be called again and again: finished runs are kept, the others are done.
#   examples/pytorch/parity_runs.sh BUILD OUT [--runs "exact-1 e4m3-1 ..."] [--steps N] [--seconds LIMIT] [--pack FILE.tar.gz]
#   halfwire parity OUT/exact-* --candidate OUT/e4m3-* --noise OUT/noise-*
# BUILD holds bin/halfwire. --seconds: no run is begun that would probably end after this many seconds; the exit code is
# 3 while runs are missing. --pack: all finished runs and their logs as one archive, also when some are missing.
# Further arguments for gpt.py go into GPT_ARGS, a python other than python3 into PYTHON.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
halfwire=$(cd "$1" && pwd)/bin/halfwire
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
runs="exact-1 e4m3-1 int8-1 noise-1 exact-2 e4m3-2 int8-2 noise-2 exact-3 e4m3-3 int8-3 noise-3"
steps=1000 limit=100000 pack=""
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
  case $1 in
    --runs) runs=$2 ;;
    --steps) steps=$2 ;;
    --seconds) limit=$2 ;;
    --pack) pack=$2 ;;
    *) echo "unknown argument $1" >&2; exit 2 ;;
  esac
  shift 2
done
[ -x "$halfwire" ] || { echo "$halfwire is not there: build it first" >&2; exit 2; }

# One MPS daemon for all runs: begin again inside shared_gpu.sh.
if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && [ -z "${PARITY_RUNS_NO_MPS:-}" ]; then
  pack_args=()
  [ -z "$pack" ] || pack_args=(--pack "$pack")
  exec "$here/shared_gpu.sh" "$0" "$(dirname "$(dirname "$halfwire")")" "$out" --runs "$runs" --steps "$steps" \
    --seconds "$limit" "${pack_args[@]}"
fi

mkdir -p "$out/logs"
longest=0 missing=0
for run in $runs; do
  variant=${run%-*} seed=${run##*-}
  case $variant in
    exact) how=(--mode off) ;;
    e4m3 | e3m4 | e5m2 | int8) how=(--mode wire --format "$variant" --min-bytes 1KiB) ;;
    noise) how=(--mode noise --seed "$seed" --min-bytes 1KiB) ;;
    *) echo "$run: a run is exact-SEED, e4m3-SEED, e3m4-SEED, e5m2-SEED, int8-SEED or noise-SEED" >&2; exit 2 ;;
  esac
  [ -e "$out/$run/rank0.jsonl" ] && continue
  if [ $((SECONDS + longest + longest / 5)) -gt "$limit" ]; then
    missing=$((missing + 1))
    continue
  fi
  begun=$SECONDS
  rm -rf "$out/$run.part"
  # shellcheck disable=SC2086  # GPT_ARGS is a list of words
  if timeout --kill-after=15 "$((limit - SECONDS))" "$halfwire" run "${how[@]}" -n 4 -- "${PYTHON:-python3}" "$here/gpt.py" --share-gpu \
    --steps "$steps" --seed "$seed" --record "$out/$run.part" ${GPT_ARGS:-} >"$out/logs/$run.txt" 2>&1; then
    mv "$out/$run.part" "$out/$run"
    echo "$run: $((SECONDS - begun)) s, $(grep '(mean of' "$out/logs/$run.txt" || true)"
  else
    missing=$((missing + 1))
    echo "$run failed or ran out of time; the end of $out/logs/$run.txt:" >&2
    tail -n 15 "$out/logs/$run.txt" >&2
  fi
  [ $((SECONDS - begun)) -le "$longest" ] || longest=$((SECONDS - begun))
done

if [ -n "$pack" ]; then
  finished=(logs)
  for run in $runs; do
    [ -e "$out/$run/rank0.jsonl" ] && finished+=("$run")
  done
  tar -C "$out" -czf "$pack" "${finished[@]}"
fi
[ "$missing" -eq 0 ] || { echo "$missing runs missing: call again" >&2; exit 3; }
