#!/bin/bash
# Equal compute instead of equal tokens: the baselines with as much arithmetic as self-refinement spends; and
# self-refinement with the tokens of the scorer's training added to its own. Run train.sh first.
#
#   experiments/mini/compute.sh           # SEEDS="0 1 2" JOBS=4; --smoke as in train.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for seed in $SEEDS; do
    same=(train.init=$runs/$seed/base train.seed=$seed)
    train "$seed/self-refine-longer" self-refine "${same[@]}" train.steps=$steps_longer
    train "$seed/block-diffusion-compute" block-diffusion "${same[@]}" train.steps=$steps_equal_compute
    train "$seed/autoregressive-compute" autoregressive "${same[@]}" train.steps=$steps_autoregressive
done
settle
