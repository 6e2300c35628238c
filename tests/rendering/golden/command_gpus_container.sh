#!/bin/bash
#SBATCH --job-name=nemo-megatron-command
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=64G
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --no-requeue
#SBATCH --output=/shared/results/command/launches/1/log-nemo-megatron-command_%j.out
#SBATCH --open-mode=append

# Made by Slipway. supervisor.pyz does the rest: claim, next link, rendezvous, marks, signals, and why the job ended.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets
exec 9< <(env -0) # as submitted, before anything is exported: the next link is submitted in it
slipway_fail() { echo "Job ${SLURM_JOB_ID:-$$}: $1 on ${HOSTNAME:-this node}" >&2 && exit 1; }
SLIPWAY_DIR=/shared/results/command/launches/1
[[ -f $SLIPWAY_DIR/supervisor.pyz ]] || slipway_fail "no $SLIPWAY_DIR (moved since it was launched, or not mounted)"
SLIPWAY_PYTHON=/usr/bin/python3
[[ -x $SLIPWAY_PYTHON ]] || read -r SLIPWAY_PYTHON < <(command -v /usr/libexec/platform-python python3) || slipway_fail "no python3"

# Environment
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_DEBUG=INFO

# Tasks
exec 8< <(scontrol show hostnames "${SLURM_JOB_NODELIST-}" 2>/dev/null) # while Python starts
exec "$SLIPWAY_PYTHON" -IS "$SLIPWAY_DIR/supervisor.pyz" golden "$@" -- \
    srun \
    --kill-on-bad-exit=1 \
    --export=ALL \
    '--container-image=nvcr.io#nvidia/nemo:25.07' \
    --container-mounts=/shared/results:/shared/results,/shared/bench:/shared/bench,/shared/data:/shared/data:ro \
    --container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,TORCH_NCCL_AVOID_RECORD_STREAMS,NCCL_DEBUG \
    --no-container-mount-home \
    bash "$SLIPWAY_DIR/task.sh" \
    all_reduce_perf \
    -b \
    8M \
    --data \
    /shared/data/x

##### task.sh #####
#!/bin/bash
# task.sh COMMAND [ARGUMENT ...]: runs COMMAND once for each task (one process, one GPU), in the container when there is one.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets

# torch's names for what srun calls PROCID, NTASKS and LOCALID.
export RANK=${SLURM_PROCID:-$RANK}
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK=${SLURM_LOCALID:-$LOCAL_RANK}
export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))
export SLIPWAY_TAG=golden # by which `slipway attach` finds the ranks of this launch
export PYTHONPATH=/shared/results/command/launches/1/python${PYTHONPATH:+:$PYTHONPATH} # lets a rank say where it hangs

cd /shared/bench
# exec, so that a signal to the task is one to its payload.
exec "$@"
