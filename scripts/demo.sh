#!/usr/bin/env bash
# The demonstration: trains a small transformer on 4 local ranks over an emulated slow link, once with exact
# collectives and once over the FP8 wire, and compares the two. Leaves $dir/demo.json.
# Settings: LINK (300Mbit), RANKS (4), STEPS (the program's own), PRESET (release).
set -euo pipefail
cd "$(dirname "$0")/.."
dir=build/${PRESET:-release}
link=${LINK:-300Mbit}
ranks=${RANKS:-4}
steps=()
[ -z "${STEPS:-}" ] || steps=(--steps "$STEPS")

# The ranks share this machine's cores; more threads than cores only get in each other's way.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

for mode in off wire; do
  label=exact
  [ $mode = off ] || label=wire
  rm -rf "$dir/demo-$label"
  "$dir/bin/halfwire" run --mode $mode -n "$ranks" --link "$link" -- \
    "$dir/bin/train_lm" --out "$dir/demo-$label" --label $label "${steps[@]}"
done
"$dir/bin/train_lm_compare" "$dir/demo-exact" "$dir/demo-wire" "$dir/demo.json" "$link"
echo
echo "written: $dir/demo.json, and each rank's losses and step times in $dir/demo-exact and $dir/demo-wire"
