#!/bin/bash
# Every ablation, with one thing changed: from the same base (or, for scorers, the same self-refinement model), with the
# same rows, order and optimizer. Half the steps of the main comparison, with references of as many steps. Run train.sh
# first.
#
#   experiments/mini/ablations.sh         # SEEDS="0 1 2" JOBS=4; --smoke as in train.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# ablation NAME CONFIG INIT STEPS section.key=value ... : for every seed
ablation() {
    local name=$1 config=$2 init=$3 count=$4 seed
    shift 4
    for seed in $SEEDS; do
        train "$seed/$name" "$config" train.init=$runs/$seed/$init train.seed=$seed train.steps=$count "$@"
    done
}

half=$((steps / 2))
ablation reference self-refine base $half
ablation hard-feedback self-refine base $half method.feedback=hard
ablation no-replacement self-refine base $half method.replacement_start=0 method.replacement_end=0
ablation more-replacement self-refine base $half method.replacement_start=0.5 method.replacement_end=0.3
ablation committed-hard self-refine base $half method.committed_hard=true
ablation rescaled self-refine base $half method.rescale=true
ablation prefix-replacement self-refine base $half method.replacement=prefix
ablation passes-1 self-refine base $half method.passes=1
ablation passes-2 self-refine base $half method.passes=2
ablation passes-5 self-refine base $half method.passes=5
ablation sampled-drafts self-refine base $half method.drafts=sampled
ablation block-8 self-refine base $half method.block_size=8
ablation block-diffusion-reference block-diffusion base $half
ablation block-diffusion-all-noise block-diffusion base $half method.noise_min=0.001
ablation block-diffusion-block-8 block-diffusion base $half method.block_size=8
ablation beam-negatives best-of-n self-refine $scorer_steps method.negatives=beam
ablation scorer-layer best-of-n self-refine $scorer_steps method.scorer_layer=true
settle
