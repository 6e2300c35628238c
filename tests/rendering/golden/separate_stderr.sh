#!/bin/bash
#SBATCH --job-name=nemo-megatron-gpt3_126m
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --dependency=singleton
#SBATCH --output=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.out
#SBATCH --error=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.err

# Made by Slipway. The configuration is beside this file, and task.sh, which sets up each task.
set -euo pipefail
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means

run=gpt3_126m
launch=1  # tag golden
launch_dir=/shared/results/gpt3_126m/launches/1
job_id=$SLURM_JOB_ID

# --- marks: what became of this job, for those who cannot ask the scheduler ---
mark() { # mark FILE TEXT, written under a temporary name so that it is never seen half done
    printf '%s\n' "$2" >"$launch_dir/.$1.$job_id"
    mv -f "$launch_dir/.$1.$job_id" "$launch_dir/$1"
}
trap 'mark exit.json "{\"job_id\": \"$job_id\", \"exit_code\": $?, \"ended\": $(date +%s)}"' EXIT

# --- environment ---
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# --- rendezvous: the first host, and a port below the ephemeral ones that differs between jobs ---
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 17 * ${SLURM_ARRAY_TASK_ID:-0} + 131 * ${SLURM_RESTART_COUNT:-0}) % 12000))
mark started.json "{\"job_id\": \"$job_id\", \"started\": $(date +%s), \"nodes\": \"${hosts//$'\n'/,}\"}"
echo "Run $run, launch $launch, job $job_id on ${hosts//$'\n'/, }; rendezvous at $MASTER_ADDR:$MASTER_PORT"

# --- tasks: one for each GPU; in the background, because bash handles signals only while it waits ---
srun \
    --kill-on-bad-exit=1 \
    --export=ALL \
    --cpus-per-task=12 \
    '--container-image=nvcr.io#nvidia/nemo:24.07' \
    --container-mounts=/shared/results:/shared/results,/shared/data:/shared/data:ro \
    --no-container-mount-home \
    bash "$launch_dir/task.sh" \
    /shared/venv/bin/python \
    -u \
    /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \
    --config-path=/shared/results/gpt3_126m/launches/1 \
    --config-name=gpt3_126m_hydra.yaml &
tasks=$!
# When a job ends, Slurm itself tells its tasks; srun, told as well, would kill them before they have saved.
trap : TERM
trap 'kill -s TERM "$tasks" 2>/dev/null || true' INT
trap 'kill -s USR1 "$tasks" 2>/dev/null || true' USR1

# A signal ends a wait early; once the tasks are gone, the last wait tells their own exit code.
while kill -0 "$tasks" 2>/dev/null; do
    wait "$tasks" || true
done
code=0
wait "$tasks" || code=$?
echo "Job $job_id: the tasks ended with exit code $code"
exit "$code"

##### task.sh #####
#!/bin/bash
# task.sh COMMAND [ARGUMENT ...]: runs COMMAND once for each task (one process, one GPU), in the container when there is one.
set -euo pipefail
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means

# torch's names for what srun calls PROCID, NTASKS and LOCALID.
export RANK=${SLURM_PROCID:-$RANK}
export WORLD_SIZE=64
export LOCAL_RANK=${SLURM_LOCALID:-$LOCAL_RANK}
export LOCAL_WORLD_SIZE=8
export PYTHONPATH=/opt/NeMo${PYTHONPATH:+:$PYTHONPATH}

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
payload=$!
trap 'kill -s TERM "$payload" 2>/dev/null || true' USR1
trap : TERM # which Slurm sends to the payload as well; twice would cut its save short
while kill -0 "$payload" 2>/dev/null; do
    wait "$payload" || true
done
code=0
wait "$payload" || code=$?
exit "$code"
