#!/bin/bash
# task.sh COMMAND [ARGUMENT ...]: runs COMMAND once for each task (one process, one GPU), in the container when there is one.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets

# torch's names for what srun calls PROCID, NTASKS and LOCALID.
export RANK=${SLURM_PROCID:-$RANK}
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK=${SLURM_LOCALID:-$LOCAL_RANK}
export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))
export SLIPWAY_TAG=20261127-122144-7a72c2 # by which `slipway attach` finds the ranks of this launch
export PYTHONPATH=@ROOT@/results/gpt3_tiny/launches/1/code${PYTHONPATH:+:$PYTHONPATH}

cd @ROOT@/results/gpt3_tiny/launches/1/code
# exec, so that a signal to the task is one to its payload.
exec "$@"
