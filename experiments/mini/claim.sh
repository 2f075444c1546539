#!/bin/bash
# One claim from the data to its file in results/mini: trains what its sweep compares, as far as that is not trained
# yet, and measures it.
#
#   experiments/mini/claim.sh layouts     # or a to f, compute, parts, blocks, speed, scorer; see sweep.sh
#   experiments/mini/claim.sh layouts --smoke
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh" "${2:-}"
config=$configs/sweep-${1:?name a claim}.toml
if [ ! -e "$config" ]; then
    echo "there is no claim $1: no $config" >&2
    exit 2
fi
# The systems of the sweep, and what scorers among them start from.
systems=$(sed -n 's/^\[system\.\(.*\)\]$/\1/p' "$config")
ONLY="base $systems"
case "$systems" in *best-of-n* | *negatives* | *scorer-layer*) ONLY="$ONLY self-refine" ;; esac
case "$systems" in *shifted-best-of-n*) ONLY="$ONLY shifted-self-refine shifted-self-refine-of-8 shifted-hard" ;; esac
export ONLY=${ONLY//$'\n'/ } WORK SEEDS JOBS FREDA TOKENS
for script in train compute ablations layouts; do "$root/experiments/mini/$script.sh" ${2:-}; done
"$root/experiments/mini/sweep.sh" ${2:-} "$1"
