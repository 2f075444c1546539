#!/bin/bash
# Bundle a trained model with the package: convert it to int8, compare it with the original on all questions, write its
# card, and put it into freda/assets, for freda generate mini, freda chat mini, freda eval mini. Run train.sh first.
#
#   experiments/mini/ship.sh best-of-n 0     # name and seed of a training; NAME=mini PYTHON=python; REPLACE=1 overwrites
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
target=${ASSETS:-$root/freda/assets}/${NAME:-mini}
if [ -e "$target" ] && [ -z "${REPLACE:-}" ]; then
    echo "$target exists already; set REPLACE=1 to overwrite it" >&2
    exit 2
fi
run=$runs/${2:-0}/${1:-best-of-n}
made=$runs/shipped
tasks=(--task mini_math --task mini_code --task mini_logic --data $runs/data --batch-size 512 --device "$DEVICE")
if [ -n "${LIMIT:-}" ]; then tasks+=(--limit "$LIMIT"); fi

[ -e $made ] || $FREDA convert "$run" $made --int8
$FREDA eval "$run" "${tasks[@]}" --out $runs/shipped-eval/whole
$FREDA eval $made "${tasks[@]}" --out $runs/shipped-eval/int8
for task in mini_math mini_code mini_logic; do
    $FREDA eval --compare $runs/shipped-eval/whole/$task $runs/shipped-eval/int8/$task
done
${PYTHON:-python} "$root/experiments/mini/card.py" --run "$run" --model $made --evals $runs/shipped-eval \
    --data $runs/data --out "$target" ${REPLACE:+--replace}
