#!/usr/bin/env bash
# Off is off: a short training under `halfwire run --mode off` ends with the same parameters as one that never heard of
# Halfwire. Usage: off_is_off.sh HALFWIRE TRAIN_LM
set -euo pipefail
halfwire=$1 train=$2 ranks=2
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$halfwire" run --mode off -n $ranks -- "$train" --steps 6 --out "$folder/off" 2>"$folder/off.log" || { cat "$folder/off.log" >&2; exit 1; }
# Both must really have run what they claim.
grep -q 'exact: Halfwire is off' "$folder/off.log" || { cat "$folder/off.log" >&2; exit 1; }

pids=()
port=$((20000 + RANDOM % 10000))
for ((rank = 0; rank < ranks; ++rank)); do
  env -u LD_PRELOAD RANK=$rank WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    timeout 200 "$train" --steps 6 --out "$folder/plain" 2>"$folder/plain$rank.log" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { cat "$folder"/plain*.log >&2; exit 1; }; done

for ((rank = 0; rank < ranks; ++rank)); do
  off=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/off/rank$rank.json")
  plain=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/plain/rank$rank.json")
  echo "rank $rank: off $off, without $plain"
  [ -n "$off" ] && [ "$off" = "$plain" ] || { echo "rank $rank: --mode off changed the parameters" >&2; exit 1; }
done
