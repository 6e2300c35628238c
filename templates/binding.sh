#!/bin/bash
# What task.sh reads to bind itself to cores of its own, near its GPU. It has set these:
: "${RANK:?}" "${LOCAL_RANK:?}" "${LOCAL_WORLD_SIZE:?}"

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
