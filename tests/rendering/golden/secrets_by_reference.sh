#!/bin/bash
#SBATCH --job-name=nemo-megatron-gpt3_126m
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=1-00:00:00
#SBATCH --dependency=singleton
#SBATCH --output=/shared/results/gpt3_126m/launches/1/log-nemo-megatron-gpt3_126m_%j.out

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
HF_TOKEN=$(head -n 1 '/home/me/my token') # read here, so that the value stands nowhere else
export HF_TOKEN
WANDB_API_KEY=$(head -n 1 /home/me/.wandb) # read here, so that the value stands nowhere else
export WANDB_API_KEY

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
expand() { # expand LIST ARRAY: "0-2,8", as the kernel writes it, to (0 1 2 8)
    local -n expanded=$2
    local part cpu
    expanded=()
    for part in ${1//,/ }; do
        for ((cpu = ${part%-*}; cpu <= ${part#*-}; cpu++)); do expanded+=("$cpu"); done
    done
}

allowed_cpus() { # allowed_cpus ARRAY: where this process may run
    local key value
    while read -r key value; do
        if [[ $key == Cpus_allowed_list: ]]; then expand "$value" "$1"; fi
    done <"/proc/$$/status"
}

gpu_nodes() { # gpu_nodes ARRAY: the NUMA node of each task's GPU; empty where that cannot be told
    local -n found=$1
    local buses bus node
    found=()
    buses=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null) || return 0
    for bus in ${buses,,}; do
        node=-1
        read -r node 2>/dev/null <"/sys/bus/pci/devices/${bus#0000}/numa_node" || true
        if ((node >= 0)); then found+=("$node"); fi
    done
    # A task that sees its own GPU alone knows nothing of the others.
    if ((${#found[@]} != LOCAL_WORLD_SIZE)); then found=(); fi
}

bind_to_cores() { # bind_to_cores MIN MAX|all equally|unequally all|one: cores for each task, and threads of each core
    local min=$1 max=$2 equally=$3 of_each=$4
    local online own_cpus before list siblings cpu node first rank share least=0 mine index=0
    local -A allowed=() cores=() tasks=() threads=()
    local -a cpus=() nodes=() near=() picked=()

    online=
    read -r online 2>/dev/null </sys/devices/system/cpu/online || true
    expand "$online" cpus
    before=$(taskset -pc $$)
    # Where the whole node is the job's, a narrower choice was the scheduler's habit, and not to protect others.
    if ((${SLURM_CPUS_ON_NODE:-0} == ${#cpus[@]})); then taskset -pc "$online" $$ >/dev/null || true; fi
    allowed_cpus cpus
    own_cpus=${SLURM_CPUS_ON_NODE:-${#cpus[@]}}
    if [[ -z $online ]] || ((${#cpus[@]} != own_cpus)); then
        echo "Rank $RANK: its cores are left as the scheduler chose them"
        return
    fi
    for cpu in "${cpus[@]}"; do allowed[$cpu]=1; done

    # The physical cores of each NUMA node, each with its hardware threads.
    for list in /sys/devices/system/node/node[0-9]*/cpulist; do
        node=${list%/cpulist} node=${node##*node}
        read -r siblings 2>/dev/null <"$list" || continue
        expand "$siblings" cpus
        for cpu in "${cpus[@]}"; do
            if [[ ! -v allowed[$cpu] ]]; then continue; fi
            siblings=$cpu # where the kernel does not tell, each is a core of its own
            read -r siblings 2>/dev/null <"/sys/devices/system/cpu/cpu$cpu/topology/thread_siblings_list" || true
            first=${siblings%%[,-]*}
            if [[ ! -v threads[$first] ]]; then cores[$node]+="$first "; fi
            threads[$first]+="${threads[$first]:+,}$cpu"
        done
        if [[ -v cores[$node] ]]; then nodes+=("$node"); fi
    done

    gpu_nodes near
    for ((rank = 0; rank < LOCAL_WORLD_SIZE; rank++)); do
        # Where the GPUs cannot be asked: spread over the nodes, as machines with eight of them are built.
        node=${near[rank]:-${nodes[rank * ${#nodes[@]} / LOCAL_WORLD_SIZE]}}
        if ((rank == LOCAL_RANK)); then mine=$node index=${tasks[$node]:-0}; fi
        tasks[$node]=$((${tasks[$node]:-0} + 1))
    done
    for node in "${!tasks[@]}"; do
        read -ra picked <<<"${cores[$node]:-}"
        share=$((${#picked[@]} / tasks[$node]))
        if ((least == 0 || share < least)); then least=$share; fi
        if ((share == 0)); then least=0 && break; fi
    done
    read -ra picked <<<"${cores[$mine]:-}"
    share=$((${#picked[@]} / tasks[$mine]))
    if [[ $equally == equally ]]; then share=$least; fi
    if [[ $max != all ]] && ((share > max)); then share=$max; fi
    if ((share < min)); then
        taskset -pc "${before##*: }" $$ >/dev/null || true
        echo "Rank $RANK: too few cores for each task of its node to have its own; it may run on ${before##*: }"
        return
    fi

    list=
    for first in "${picked[@]:index * share:share}"; do
        if [[ $of_each == all ]]; then list+="${list:+,}${threads[$first]}"; else list+="${list:+,}${threads[$first]%%,*}"; fi
    done
    taskset -pc "$list" $$ >/dev/null || list="whatever it gets, for it may not choose"
    echo "Rank $RANK: on CPUs $list of NUMA node $mine"
}

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
