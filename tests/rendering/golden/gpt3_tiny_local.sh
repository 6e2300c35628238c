#!/bin/bash

# Made by Slipway. supervisor.pyz does the rest: claim, next link, rendezvous, marks, signals, and why the job ended.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets
exec 9< <(env -0) # as submitted, before anything is exported: the next link is submitted in it
slipway_fail() { echo "Job ${SLURM_JOB_ID:-$$}: $1 on ${HOSTNAME:-this node}" >&2 && exit 1; }
SLIPWAY_DIR=/shared/results/gpt3_tiny/launches/1
[[ -f $SLIPWAY_DIR/supervisor.pyz ]] || slipway_fail "no $SLIPWAY_DIR (moved since it was launched, or not mounted)"
SLIPWAY_PYTHON=/usr/bin/python3
[[ -x $SLIPWAY_PYTHON ]] || read -r SLIPWAY_PYTHON < <(command -v /usr/libexec/platform-python python3) || slipway_fail "no python3"

# Environment
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# Tasks
exec "$SLIPWAY_PYTHON" -IS "$SLIPWAY_DIR/supervisor.pyz" golden "$@" -- \
    bash "$SLIPWAY_DIR/task.sh" \
    /shared/venv/bin/python \
    -u \
    -m \
    slipway.trainer.pretrain \
    --config-path=/shared/results/gpt3_tiny/launches/1 \
    --config-name=gpt3_tiny_hydra.yaml

##### task.sh #####
#!/bin/bash
# task.sh COMMAND [ARGUMENT ...]: runs COMMAND once for each task (one process, one GPU), in the container when there is one.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets

# torch's names for what srun calls PROCID, NTASKS and LOCALID.
export RANK=${SLURM_PROCID:-$RANK}
export WORLD_SIZE="$WORLD_SIZE"
export LOCAL_RANK=${SLURM_LOCALID:-$LOCAL_RANK}
export LOCAL_WORLD_SIZE="$LOCAL_WORLD_SIZE"
export SLIPWAY_TAG=golden # by which `slipway attach` finds the ranks of this launch
export PYTHONPATH=/shared/results/gpt3_tiny/launches/1/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=/shared/results/gpt3_tiny/launches/1/python${PYTHONPATH:+:$PYTHONPATH} # lets a rank say where it hangs

cd /shared/results/gpt3_tiny/launches/1/code
# exec, so that a signal to the task is one to its payload.
exec "$@"
