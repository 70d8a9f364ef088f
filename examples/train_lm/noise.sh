#!/usr/bin/env bash
# Noise: a short training under `halfwire run --mode noise` keeps its replicas identical, repeats bit for bit with the same
# seed, parts from the exact run and from another seed, and learns the same. Usage: noise.sh HALFWIRE TRAIN_LM
set -euo pipefail
halfwire=$1 train=$2 ranks=2
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Usage: run NAME OPTION...; sets hash_NAME, after holding the ranks' hashes against each other.
run() {
  local name=$1
  shift
  "$halfwire" run "$@" --min-bytes 0 -n $ranks -- "$train" --steps 6 --out "$folder/$name" 2>"$folder/$name.log" ||
    { cat "$folder/$name.log" >&2; exit 1; }
  local first second
  first=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/$name/rank0.json")
  second=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/$name/rank1.json")
  [ -n "$first" ] && [ "$first" = "$second" ] || { echo "$name: the replicas differ" >&2; exit 1; }
  declare -g "hash_$name=$first"
  declare -g "loss_$name=$(grep -o '"loss":\[[^]]*' "$folder/$name/rank0.json" | sed 's/.*[[,]//')"
  echo "$name: $first, last loss $(eval echo "\$loss_$name")"
}

run exact --mode off
run noise --mode noise --seed 1
grep -q 'with noise of one bf16 ulp added' "$folder/noise.log" || { cat "$folder/noise.log" >&2; exit 1; }
run again --mode noise --seed 1
run other --mode noise --seed 2
[ "$hash_noise" = "$hash_again" ] || { echo "the same seed gave other parameters" >&2; exit 1; }
[ "$hash_noise" != "$hash_exact" ] || { echo "noise changed nothing" >&2; exit 1; }
[ "$hash_noise" != "$hash_other" ] || { echo "another seed gave the same parameters" >&2; exit 1; }
awk -v a="$loss_exact" -v b="$loss_noise" 'BEGIN { d = (b - a) / a; exit !(d < 0.01 && d > -0.01) }' ||
  { echo "noise changed the loss by more than 1 %: $loss_exact, $loss_noise" >&2; exit 1; }
