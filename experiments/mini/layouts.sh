#!/bin/bash
# The shifted layout beside the paper's: every block method in both, with and without the next-token loss of the clean
# half, with the clean half as a teacher, each part of the layout alone, and blocks of 8 and 16. From the base and with
# the rows, order, optimizer and steps of train.sh, which comes first.
#
#   experiments/mini/layouts.sh           # SEEDS="0 1 2" JOBS=4; --smoke as in train.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# variant NAME CONFIG INIT STEPS section.key=value ... : for every seed
variant() {
    local name=$1 config=$2 init=$3 count=$4 seed
    shift 4
    for seed in $SEEDS; do
        train "$seed/$name" "$config" train.init=$runs/$seed/$init train.seed=$seed train.steps=$count "$@"
    done
}

every_level=method.noise_min=0.001 # the paper's formulation of block diffusion; ours begins at 0.3 (M26)
bare=method.layout=shifted
shifted=($bare method.ar_weight=0.5)

variant every-level block-diffusion base $steps $every_level
variant shifted-every-level block-diffusion base $steps "${shifted[@]}" $every_level
for name in self-refine block-diffusion; do
    variant shifted-$name $name base $steps "${shifted[@]}"
    variant shifted-$name-no-ar $name base $steps $bare
    variant shifted-$name-taught $name base $steps "${shifted[@]}" method.teacher=clean
    for size in 8 16; do
        variant $name-of-$size $name base $steps method.block_size=$size
        variant shifted-$name-of-$size $name base $steps "${shifted[@]}" method.block_size=$size
    done
done
variant only-shifted self-refine base $steps $bare method.context=block
variant only-causal self-refine base $steps method.context=causal
variant shifted-hard self-refine base $steps "${shifted[@]}" method.feedback=hard
# A step has 1.17 times the arithmetic of one of block diffusion in this layout, too (freda train --dry-run).
variant shifted-block-diffusion-compute block-diffusion base $steps_equal_compute "${shifted[@]}"
settle
variant shifted-best-of-n best-of-n shifted-self-refine $scorer_steps $bare
variant shifted-best-of-n-of-8 best-of-n shifted-self-refine-of-8 $scorer_steps $bare method.block_size=8
variant shifted-best-of-n-hard best-of-n shifted-hard $scorer_steps $bare method.feedback=hard
settle
