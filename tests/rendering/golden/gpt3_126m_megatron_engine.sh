#!/bin/bash
#SBATCH --job-name=nemo-megatron-gpt3_126m
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --dependency=singleton
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300
#SBATCH --output=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.out
#SBATCH --open-mode=append

# Made by Slipway. The configuration is beside this file, and task.sh, which sets up each task.
set -euo pipefail
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means
set +xv # a SHELLOPTS in the environment would print the values of secrets

run=gpt3_126m
launch=1
tag=golden # no other launch has it
launch_dir=/shared/results/gpt3_126m/launches/1
job_id=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
life=$job_id${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}.${SLURM_RESTART_COUNT:-0} # a requeued job has several

# --- marks: what became of this job, for those who cannot ask the scheduler; on a full disk it goes on without ---
say() { echo "Job $job_id: $*" || true; }
marks=$launch_dir/marks
mark() { # mark NAME FIELDS, written under a temporary name so that it is never seen half done
    if ! { printf '{"job_id": "%s", %s}\n' "$job_id" "$2" >"$marks/.$life.$1" && mv -f "$marks/.$life.$1" "$marks/$life.$1.json"; }; then
        say "could not leave the mark $marks/$life.$1.json"
    fi
}
if [[ ! -f $launch_dir/task.sh ]]; then # Slurm, since 23.02, makes the directory of a log that is gone
    say "there is no $launch_dir on ${HOSTNAME:-this node}: moved since it was launched, or not mounted" >&2
    exit 1
fi
mkdir -p "$marks" || true
claim() { # claim FILE JOB: it is that job's from now on, unless it is another's
    # A link has its content from the start.
    if echo "$2" >"$marks/.$life.claim"; then
        ln "$marks/.$life.claim" "$1" 2>/dev/null ||
            (set -o noclobber && echo "$2" >"$1") 2>/dev/null || true # no links on this file system
    fi
    rm -f "$marks/.$life.claim" || true
}
link=1 by_hand=yes
if (($#)) && [[ ${!#} == "$tag" ]]; then # not by hand: where Slurm's answer was lost, there may be two jobs of this launch
    by_hand=''
    if [[ $# == 2 && $1 =~ ^[1-9][0-9]{0,5}$ ]]; then link=$1; fi
    mine=$marks/job
    if ((link > 1)); then mine+=.$link; fi
    claim "$mine" "$job_id" # the first that begins is it, unless the launcher has said which
    claimed=$(cat "$mine" || true)
    if [[ $claimed && $claimed != "$job_id" ]]; then
        say "leaves without doing anything: $mine says $claimed"
        exit 0
    fi
    if [[ -e $marks/chain-ended ]]; then
        say "leaves without doing anything, as $marks/chain-ended says: $(head -c 1000 "$marks/chain-ended" || true)"
        exit 0
    fi
fi
tasks_ended=no # a signal that ends the script before leaves 0 in $?
trap 'code=$?; trap "" TERM INT USR1; [[ $code != 0 || $tasks_ended == yes ]] || code=143; end_link "$code" || mark ended "\"exit_code\": $code, \"ended\": $(date +%s)"' EXIT

# --- the chain: what came before, and what comes next; before anything is exported that is for the tasks alone ---
# shellcheck source=/dev/null
source "$launch_dir/resilience.sh"
chain_is links=1 \
    submit=job \
    max_failures=3 \
    exclude_seconds=86400 \
    exclude= \
    header_excludes= \
    singleton=yes \
    begin= \
    scheduler=slurm \
    engine=megatron \
    save_signal=USR1 \
    tasks_per_node=8 \
    checkpoints=/shared/results/gpt3_126m/checkpoints \
    failures=/shared/results/gpt3_126m/launches/1/results/failures \
    run_dir=/shared/results/gpt3_126m \
    script=/shared/results/gpt3_126m/launches/1/nemo-megatron-gpt3_126m_submission.sh \
    log=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_
if [[ $by_hand ]]; then chain_is links=1; fi # no link of this launch's chain
begin_link || say "what came before could not be told"

# --- environment ---
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# --- rendezvous: the first host, and a port below the ephemeral ones that differs between jobs ---
free_port() { # free_port NUMBER: its port, or if something listens there on this host, the next of its row
    local port hex try listening
    listening=" $(awk '$4 == "0A" { sub(/.*:/, "", $2); print $2 }' /proc/net/tcp /proc/net/tcp6 2>/dev/null | tr '\n' ' ' || true)"
    for ((try = 0; try < 50; try++)); do
        port=$((20000 + ($1 + 4001 * try) % 12000)) # not the next number's
        printf -v hex %04X "$port"
        [[ $listening == *" $hex "* ]] || break
    done
    echo "$port"
}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$(free_port "$SLURM_JOB_ID")
export MASTER_PORT
mark started "\"started\": $(date +%s), \"nodes\": \"${hosts//$'\n'/,}\", $(place_in_chain)"
say "run $run, launch $launch, on ${hosts//$'\n'/, }; rendezvous at $MASTER_ADDR:$MASTER_PORT"

# --- tasks: one for each GPU; in the background, because bash handles signals only while it waits ---
srun \
    --kill-on-bad-exit=1 \
    --export=ALL \
    '--container-image=nvcr.io#nvidia/nemo:25.07' \
    --container-mounts=/shared/results:/shared/results,/shared/data:/shared/data:ro \
    --container-env=MASTER_ADDR,MASTER_PORT,TRANSFORMERS_OFFLINE,TORCH_NCCL_AVOID_RECORD_STREAMS,NCCL_NVLS_ENABLE \
    --no-container-mount-home \
    bash "$launch_dir/task.sh" \
    python3 \
    -u \
    -m \
    trainer.pretrain \
    --config-path=/shared/results/gpt3_126m/launches/1 \
    --config-name=gpt3_126m_hydra.yaml &
tasks=$! signalled=''
# When a job ends, Slurm itself tells its tasks; srun, told as well, would kill them before they have saved.
trap 'signalled=${signalled:-TERM}' TERM
trap 'signalled=${signalled:-INT}; kill -s TERM "$tasks" 2>/dev/null || true' INT
trap 'signalled=${signalled:-USR1}; kill -s USR1 "$tasks" 2>/dev/null || true' USR1

# A signal ends a wait early; once the tasks are gone, the last wait tells their own exit code.
while kill -0 "$tasks" 2>/dev/null; do
    wait "$tasks" || true
done
code=0
wait "$tasks" || code=$?
((code >= 0)) || code=143 # bash loses it when it is signalled with its tasks
tasks_ended=yes
trap '' TERM INT USR1 # Slurm signals the whole job: what is still to do must not end half done
if ((code == 0)); then # also when Slurm ends the job: srun tells 0 of a node that was lost
    for _ in 1 2 3; do # a signal to the whole job ends `timeout`
        # Of an array this task alone, whose last one has the array's own id. In a salloc $job_id is a process.
        state=$(timeout --signal=KILL 20 squeue --noheader --states=all --format=%T \
            --jobs="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" 2>/dev/null) && break
        state=
    done
    case $state in # what is none of these words, a site's own or a notice, says nothing against the job
    RUNNING | SIGNALING | RESIZING | SUSPENDED) ;;
    COMPLETING | CANCELLED | TIMEOUT | DEADLINE | PREEMPTED | NODE_FAIL | BOOT_FAIL | OUT_OF_MEMORY | FAILED | \
        PENDING | REQUEUED | REQUEUE_HOLD | SPECIAL_EXIT)
        say "Slurm is ending it ($state)"
        code=1
        ;;
    *) say "whether Slurm ended it could not be asked${state:+: squeue says $state}" ;;
    esac
fi
say "the tasks ended with exit code $code"
if ((code == 0)) && has_to_go_on; then code=75; fi # its engine says that it is done, and it is not
exit "$code"

##### task.sh #####
#!/bin/bash
# task.sh COMMAND [ARGUMENT ...]: runs COMMAND once for each task (one process, one GPU), in the container when there is one.
set -euo pipefail
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means
set +xv # a SHELLOPTS in the environment would print the values of secrets

# torch's names for what srun calls PROCID, NTASKS and LOCALID.
export RANK=${SLURM_PROCID:-$RANK}
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK=${SLURM_LOCALID:-$LOCAL_RANK}
export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))
export SLIPWAY_TAG=golden # by which `slipway attach` finds the ranks of this launch
export PYTHONPATH=/shared/results/gpt3_126m/launches/1/code${PYTHONPATH:+:$PYTHONPATH}

# --- cores: whole ones of the GPU's NUMA node, shared with no other task of this node ---
# shellcheck source=/dev/null
source /shared/results/gpt3_126m/launches/1/binding.sh
if command -v taskset >/dev/null && [[ -d /sys/devices/system/node/node0 ]]; then
    bind_to_cores 1 8 equally all
fi

cd /shared/results/gpt3_126m/launches/1/code
# exec, so that a signal to the task is one to its payload.
exec "$@"
