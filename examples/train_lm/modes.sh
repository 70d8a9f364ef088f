#!/usr/bin/env bash
# What the modes that compress nothing promise, on a short training: noise keeps its replicas identical, repeats bit for bit with
# the same seed, parts from the exact run and from another seed, and learns the same; the shadow ends with the parameters of
# --mode off and says what FP8 would have done to the gradients. Usage: modes.sh HALFWIRE TRAIN_LM
set -euo pipefail
halfwire=$1 train=$2 ranks=2
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
declare -A hash loss

fail() { echo "$*" >&2; exit 1; }

# Usage: run NAME OPTION...; sets hash[NAME], after holding the ranks' hashes against each other, and loss[NAME].
run() {
  local name=$1 second
  shift
  "$halfwire" run "$@" --min-bytes 0 -n $ranks -- "$train" --steps 8 --out "$folder/$name" 2>"$folder/$name.log" ||
    { cat "$folder/$name.log" >&2; exit 1; }
  hash[$name]=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/$name/rank0.json")
  second=$(grep -o '"params_hash":"[0-9a-f]*"' "$folder/$name/rank1.json")
  [ -n "$second" ] && [ "${hash[$name]}" = "$second" ] || fail "$name: the replicas differ"
  loss[$name]=$(grep -o '"loss":\[[^]]*' "$folder/$name/rank0.json" | sed 's/.*[[,]//')
  echo "$name: ${hash[$name]}, last loss ${loss[$name]}"
}

run exact --mode off
run noise --mode noise --seed 1
run again --mode noise --seed 1
run other --mode noise --seed 2
grep -q 'with noise of one bf16 ulp added' "$folder/noise.log" || { cat "$folder/noise.log" >&2; exit 1; }
[ "${hash[noise]}" = "${hash[again]}" ] || fail "the same seed gave other parameters"
[ "${hash[noise]}" != "${hash[exact]}" ] || fail "noise changed nothing"
[ "${hash[noise]}" != "${hash[other]}" ] || fail "another seed gave the same parameters"
awk -v a="${loss[exact]}" -v b="${loss[noise]}" 'BEGIN { d = (b - a) / a; exit !(d < 0.01 && d > -0.01) }' ||
  fail "noise changed the loss by more than 1 %"

run shadow --mode shadow --shadow-every 1 --shadow-formats e4m3,int8
[ "${hash[shadow]}" = "${hash[exact]}" ] || fail "the shadow changed the parameters"
grep 'In the shadow' -A8 "$folder/shadow.log"
# Gradients are no normal numbers: e4m3 in blocks of 128 keeps 31 to 36 dB of them, int8 more.
awk '/^  AllReduce.*e4m3\/128/ { ++e; if ($7 < 30 || $7 > 38) bad = 1 } /^  AllReduce.*int8\/128/ { ++i; if ($7 < 38 || $7 > 50) bad = 1 }
     END { exit !(e >= 1 && i >= 1 && !bad) }' "$folder/shadow.log" || { cat "$folder/shadow.log" >&2; exit 1; }
