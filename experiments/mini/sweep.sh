#!/bin/bash
# The paper's claims, one sweep each: measured, drawn, and kept in results/mini. Run train.sh first; for compute also
# compute.sh, for e and f ablations.sh, for those on layouts all three and layouts.sh; or claim.sh, which trains what a
# claim needs.
#
#   experiments/mini/sweep.sh             # a to f and compute; or some: experiments/mini/sweep.sh a layouts
#
#   a  self-refinement against block diffusion against autoregressive, by kind of task
#   b  accuracy against passes                 c  accuracy against speed; stability under further passes
#   d  weight of the scorer, candidates        e  every ablation of self-refinement     f  those of the scorer
#   compute  as a, with equal compute instead of equal tokens
#
#   layouts  as a, in both layouts             layouts-compute  the same with equal compute
#   parts    each part of the shifted layout   blocks  blocks of 4, 8 and 16
#   speed    as c, shifted                     scorer  Best-of-N, shifted: weight, candidates, and an oracle
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# sweep CLAIM : in the background; models of other seeds than the file's are named on the command line
sweep() {
    local config=$configs/sweep-$1.toml options=() system seed models
    mapfile -t options < <(settings $SWEEP)
    if [ "$SEEDS" != "0 1 2" ]; then
        for system in $(sed -n 's/^\[system\.\(.*\)\]$/\1/p' "$config"); do
            models=
            for seed in $SEEDS; do models+="\"$runs/$seed/$system\","; done
            options+=(--set "system.$system.models=[$models]")
        done
    fi
    background "$runs/sweep-$1" $FREDA sweep "$config" --data $runs/data --out "$runs/sweep-$1" \
        --device "$DEVICE" --dtype "$DTYPE" "${options[@]}"
}

[ $# -gt 0 ] || set -- a b c d e f compute
for claim in "$@"; do sweep "$claim"; done
settle
mkdir -p results/mini
for claim in "$@"; do cp "$runs/sweep-$claim/sweep.json" "results/mini/$claim.json"; done
