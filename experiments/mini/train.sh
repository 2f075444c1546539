#!/bin/bash
# Prepare the data, then train for every seed the base and what continues it.
#
#   experiments/mini/train.sh             # SEEDS="0 1 2" JOBS=4
#   experiments/mini/train.sh --smoke     # everything on two cores, with models that learn nothing
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ ! -e $runs/data/manifest.json ]; then
    mapfile -t options < <(settings "prepare.tokens=$TOKENS" "${prepare_set[@]}")
    $FREDA prepare "$configs/data.toml" $runs/data "${options[@]}"
fi

for seed in $SEEDS; do
    train "$seed/base" base "${base_set[@]}" train.seed=$seed train.steps=$base_steps
done
settle
for seed in $SEEDS; do
    same=(train.init=$runs/$seed/base train.seed=$seed) # and the same rows in the same order
    train "$seed/self-refine" self-refine "${same[@]}" train.steps=$steps
    train "$seed/block-diffusion" block-diffusion "${same[@]}" train.steps=$steps
    train "$seed/autoregressive" autoregressive "${same[@]}" train.steps=$steps
done
settle
for seed in $SEEDS; do
    train "$seed/best-of-n" best-of-n train.init=$runs/$seed/self-refine train.seed=$seed train.steps=$scorer_steps
done
settle
