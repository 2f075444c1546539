#!/bin/bash
# Training on several nodes under Slurm; sbatch configs/slurm-train.sh CONFIG RUN
#
# RUN and the paths in CONFIG lie on a file system that all nodes see. Started again, by hand or by --requeue, the job
# resumes RUN. Three minutes before its time is over torchrun gets SIGTERM; its processes save and exit.
#SBATCH --job-name=freda
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180
set -euo pipefail
config=$1 run=$2

if [ -f "$run/config.toml" ]; then
    arguments=(--resume "$run")
else
    arguments=("$config" --out "$run")
fi

# torchrun passes SIGTERM on and kills its processes after this time; torch 2.11 does so after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500" \
    -m freda train "${arguments[@]}"
