#!/usr/bin/env bash
# The shadow leaves the training as it is: a short run under `halfwire run --mode shadow` ends with the parameters of
# --mode off, and its report says what FP8 would have done to the gradients. Usage: shadow.sh HALFWIRE TRAIN_LM
set -euo pipefail
halfwire=$1 train=$2 ranks=2
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

run() {
  local name=$1
  shift
  "$halfwire" run "$@" --min-bytes 0 -n $ranks -- "$train" --steps 9 --out "$folder/$name" 2>"$folder/$name.log" ||
    { cat "$folder/$name.log" >&2; exit 1; }
}
run off --mode off
run shadow --mode shadow --shadow-every 1 --shadow-formats e4m3,int8
for ((rank = 0; rank < ranks; ++rank)); do
  off=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/off/rank$rank.json")
  shadow=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/shadow/rank$rank.json")
  [ -n "$off" ] && [ "$off" = "$shadow" ] || { echo "rank $rank: the shadow changed the parameters: $off, $shadow" >&2; exit 1; }
done
grep 'In the shadow' -A8 "$folder/shadow.log"
# Gradients are not normal numbers; e4m3 in blocks of 128 keeps 31 to 36 dB of them, int8 more.
awk '/e4m3\/128/ { ++e; if ($7 < 30 || $7 > 38) bad = 1 } /int8\/128/ { ++i; if ($7 < 38 || $7 > 50) bad = 1 }
     END { exit !(e >= 1 && i >= 1 && !bad) }' "$folder/shadow.log" || { cat "$folder/shadow.log" >&2; exit 1; }
