# What the small-scale experiments share: paths, amounts, and trainings that run once. Sourced by the scripts beside it,
# which list the commands. All can be stopped and started again; what is marked as finished is not repeated, so another
# number of steps, or a sweep over other seeds, needs another WORK.
#
#   WORK   folder for runs/mini-suite; the repository by default
#   SEEDS  seeds of all trainings, "0 1 2"
#   JOBS   trainings at a time on the one device; a model this small does not fill it, and waits for the host. After
#          nvidia-cuda-mps-control -d, kernels of several trainings run side by side.
#   FREDA  the program, for instance "python -m freda"
#   TOKENS training tokens to prepare; the longest run ends with row 122,624, of 1,024 tokens each
#   PERCENT  of the steps of every training, 100 or less, for a first look; what follows the base starts after its rows
#   ONLY   names of trainings, for instance "base self-refine"; all by default
#   TRAIN  more settings for every training, as "section.key=value ..."
#   SWEEP  more settings for every sweep, in the same form
#   DTYPE  precision of sweeps, float32 by default; bfloat16 uses the decoding kernels of a GPU
#
# --smoke runs everything in about two minutes on two cores, in a folder of its own. Its numbers mean nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
configs=$root/configs/mini
runs=runs/mini-suite

if [ "${1:-}" = --smoke ]; then
    shift
    WORK=${WORK:-$root/runs/smoke} SEEDS=${SEEDS:-0} JOBS=${JOBS:-2} TOKENS=${TOKENS:-100_000} DEVICE=cpu
    prepare_set=(mini.validation_documents=20 prepare.parts=1)
    base_set=(model.dim=32 model.layers=2 model.heads=2 model.kv_heads=2 model.head_dim=16 model.ffn_dim=64)
    TRAIN="train.batch_rows=2 train.group_rows=1 train.warmup_steps=1 train.validation_rows=2 ${TRAIN:-}"
    TRAIN="train.device=cpu $TRAIN"
    base_steps=4 steps=4 steps_equal_compute=5 steps_autoregressive=9 steps_longer=6 scorer_steps=2
    SWEEP="sweep.limit=3 sweep.thresholds=[0.5,0.9] sweep.stability_examples=2 sweep.max_new_tokens=12 ${SWEEP:-}"
    export OMP_NUM_THREADS=1
else
    prepare_set=() base_set=()
    # A step of self-refinement has 1.17 times the arithmetic of one of block diffusion and 2.29 times that of an
    # autoregressive one (freda train --dry-run): for equal compute they get as many more steps.
    PERCENT=${PERCENT:-100}
    base_steps=$((2000 * PERCENT / 100)) steps=$((800 * PERCENT / 100)) scorer_steps=$((400 * PERCENT / 100))
    steps_equal_compute=$((936 * PERCENT / 100)) steps_autoregressive=$((1832 * PERCENT / 100))
    steps_longer=$((1200 * PERCENT / 100))
fi
WORK=${WORK:-$root} SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-4} TOKENS=${TOKENS:-130_000_000} FREDA=${FREDA:-freda}
DEVICE=${DEVICE:-auto} DTYPE=${DTYPE:-float32} TRAIN=${TRAIN:-} SWEEP=${SWEEP:-}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # for python -m freda from any folder
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4} # for each of the trainings side by side
wanted=()
mkdir -p "$WORK/$runs"
cd "$WORK"
trap 'jobs -p | xargs -r kill 2>/dev/null || true; wait' EXIT # a training that receives a signal saves first
trap 'exit 130' INT
trap 'exit 143' TERM

# settings NAME=VALUE ... : as options
settings() {
    local one
    for one in "$@"; do printf -- '--set\n%s\n' "$one"; done
}

# background FOLDER COMMAND ... : run once, as soon as fewer than JOBS are running; output goes to FOLDER.log
background() {
    local folder=$1
    shift
    wanted+=("$folder")
    if [ -e "$folder/finished" ]; then return; fi
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
    mkdir -p "$(dirname "$folder")"
    watched "$folder" "$@" &
}

# watched FOLDER COMMAND ... : mark the folder as finished if the command finishes; a signal is passed on first
watched() {
    local folder=$1 child code=0
    shift
    "$@" >"$folder.log" 2>&1 &
    child=$!
    trap 'kill "$child" 2>/dev/null || true' TERM INT
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child" || code=$?; done
    # a training that received SIGTERM exits with 0 too, and prints the command that resumes it
    if [ "$code" != 0 ] || grep -q ": freda train --resume " "$folder.log"; then
        echo "$folder: not finished, see $WORK/$folder.log" >&2
        tail -n 3 "$folder.log" >&2
        return
    fi
    touch "$folder/finished"
    echo "$folder: finished"
}

# train FOLDER CONFIG [section.key=value ...] : start a training, or resume it where it was stopped
train() {
    local folder=$runs/$1 config=$configs/$2.toml options
    if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" ${1#*/} "* ]]; then return; fi
    shift 2
    if [ -e "$folder/config.toml" ]; then
        background "$folder" $FREDA train --resume "$folder"
    else
        mapfile -t options < <(settings "$@" $TRAIN)
        background "$folder" $FREDA train "$config" --out "$folder" "${options[@]}"
    fi
}

# settle : wait for all of them; if one failed, the script ends after the others
settle() {
    local folder
    wait
    for folder in "${wanted[@]}"; do [ -e "$folder/finished" ] || exit 1; done
}
