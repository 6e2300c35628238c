#!/bin/bash
#SBATCH --job-name=nemo-megatron-gpt3_126m
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --dependency=singleton
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300
#SBATCH --segment=3
#SBATCH --output=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.out
#SBATCH --open-mode=append

# Made by Slipway. supervisor.pyz does the rest: claim, next link, rendezvous, marks, signals, and why the job ended.
set -euo pipefail +o posix +xv # a POSIXLY_CORRECT would change what bash means, a SHELLOPTS print the values of secrets
exec 9< <(env -0) # as submitted, before anything is exported: the next link is submitted in it
slipway_fail() { echo "Job ${SLURM_JOB_ID:-$$}: $1 on ${HOSTNAME:-this node}" >&2 && exit 1; }
SLIPWAY_DIR=/shared/results/gpt3_126m/launches/1
[[ -f $SLIPWAY_DIR/supervisor.pyz ]] || slipway_fail "no $SLIPWAY_DIR (moved since it was launched, or not mounted)"
SLIPWAY_PYTHON=/usr/bin/python3
[[ -x $SLIPWAY_PYTHON ]] || read -r SLIPWAY_PYTHON < <(command -v /usr/libexec/platform-python python3) || slipway_fail "no python3"

# Environment
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# Tasks
exec 8< <(scontrol show hostnames "${SLURM_JOB_NODELIST-}" 2>/dev/null) # while Python starts
exec "$SLIPWAY_PYTHON" -IS "$SLIPWAY_DIR/supervisor.pyz" golden "$@" -- \
    srun \
    --nodes=4 \
    --ntasks=32 \
    --nodelist=%SLIPWAY_HOSTS% \
    --ntasks-per-node=8 \
    --kill-on-bad-exit=1 \
    --export=ALL \
    '--container-image=nvcr.io#nvidia/nemo:25.07' \
    --container-mounts=/shared/results:/shared/results,/shared/data:/shared/data:ro \
    --container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,TORCH_NCCL_AVOID_RECORD_STREAMS,NCCL_NVLS_ENABLE \
    --no-container-mount-home \
    bash "$SLIPWAY_DIR/task.sh" \
    /shared/venv/bin/python \
    -u \
    /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \
    --config-path=/shared/results/gpt3_126m/launches/1 \
    --config-name=gpt3_126m_hydra.yaml

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
export PYTHONPATH=/opt/NeMo${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=/shared/results/gpt3_126m/launches/1/python${PYTHONPATH:+:$PYTHONPATH} # lets a rank say where it hangs

# --- cores: whole ones of the GPU's NUMA node, shared with no other task of this node ---
# shellcheck source=/dev/null
source /shared/results/gpt3_126m/launches/1/binding.sh
if command -v taskset >/dev/null && [[ -d /sys/devices/system/node/node0 ]]; then
    bind_to_cores 1 8 equally all
fi

cd /opt/NeMo
# USR1 comes to all processes of a task. The payload is told to save by TERM, and it alone: the helpers that write
# its checkpoints must not end. An ignored signal stays so through exec.
(
    trap '' USR1
    exec "$@"
) &
SLIPWAY_PAYLOAD=$!
trap 'trap : USR1; kill -s TERM "$SLIPWAY_PAYLOAD" 2>/dev/null || true' USR1 # once: the next one would end it while it saves
trap : TERM # which Slurm sends to the payload as well; twice would cut its save short
while kill -0 "$SLIPWAY_PAYLOAD" 2>/dev/null; do
    wait "$SLIPWAY_PAYLOAD" || true
done
SLIPWAY_CODE=0
wait "$SLIPWAY_PAYLOAD" || SLIPWAY_CODE=$?
exit "$SLIPWAY_CODE"
