#!/bin/bash
# Why a job ended, by the table of rules in failure_rules.tsv; `launcher.failures.judging` says the same in Python.
# shellcheck disable=SC2034 # set for who calls it

evidence() { # evidence SINCE FAILURES LOG ...: what ranks left when they failed since then, and the ends of the logs
    local since=$1 failures=$2 log told
    shift 2
    for told in "$failures"/globalrank-*.json; do # "time" comes first: they are sorted by it
        if [[ -f $told ]]; then
            LC_ALL=C sed -nE '1s/^\{"time": ([0-9]+)(\.[0-9]*)?, .*/\1\2 &/p' "$told" 2>/dev/null || true
        fi
    done | LC_ALL=C sort -n | LC_ALL=C awk -v since="$since" '$1 >= since' | cut -d ' ' -f 2-
    for log in "$@"; do
        if [[ -f $log ]]; then
            tail -c 1048576 "$log" | tr '\r\000' '\n '
            echo # its last line may be unfinished
        fi
    done
}

judge() { # judge TABLE FACTS HOSTS TASKS_PER_NODE EVIDENCE: sets rule, verdict, means, and blamed: of the hosts, blanks between
    local table=$1 facts=$2 hosts=$3 tasks_per_node=$4 evidence=$5 of nodes pattern line
    blamed=''
    while IFS=$'\t' read -r rule of verdict nodes pattern means; do
        if [[ $of == end ]]; then
            line=$facts
            [[ $facts =~ $pattern ]] || continue
        else
            line=$(LC_ALL=C grep -a -m 1 -E -e "$pattern" "$evidence" 2>/dev/null) || continue
        fi
        case $nodes in
        line) blamed=$(named_in "$line" "$hosts" "$tasks_per_node") ;;
        down)
            blamed=$(down_of "$hosts")
            if [[ ! $blamed ]]; then
                line=$(LC_ALL=C grep -a -m 1 '^srun: error: Node failure on ' "$evidence" 2>/dev/null) || true
                blamed=$(named_in "$line" "$hosts" "$tasks_per_node")
            fi
            ;;
        esac
        if [[ $verdict == exclude && ! $blamed ]]; then verdict='continue'; fi
        return 0
    done <"$table"
    rule=unknown verdict='continue' means='nothing is known of its end'
}

named_in() { # named_in LINE HOSTS TASKS_PER_NODE: the first of the hosts that a line names, else that of the rank it names
    local LC_ALL=C line=$1 hosts any
    read -r -a hosts <<<"$2"
    any=$(IFS='|' && echo "${hosts[*]//./\\.}")
    if [[ $line =~ (^|[^A-Za-z0-9_.-])($any)([^A-Za-z0-9_-]|$) ]]; then
        echo "${BASH_REMATCH[2]}"
    elif [[ $line =~ [Rr]ank\"?:?\ ?([0-9]{1,7})([^0-9]|$) ]]; then
        echo "${hosts[10#${BASH_REMATCH[1]} / $3]:-}" # srun deals ranks out node by node
    fi
}

down_of() { # down_of HOSTS: those of them that Slurm takes for dead, or cannot reach
    local host state
    { timeout --signal=KILL 20 sinfo --noheader --Node --format='%N %T' --nodes="${1// /,}" 2>/dev/null || true; } |
        sort -u | while read -r host state; do
        case $state in
        down* | fail* | error* | unk* | *'*') echo "$host" ;;
        esac
    done | paste -s -d ' ' -
}
