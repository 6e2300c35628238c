#!/bin/bash
# What the job script reads to tell how a link of a chain ended; resilience.sh calls it. Text of a log is anybody's: it
# is matched, and nothing of it is passed on but names of this job's own nodes.
# shellcheck disable=SC2034,SC2154 # set or used in the script and in resilience.sh

slurm_state() { # slurm_state JOB: Slurm's word for one that has ended; nothing where it cannot tell
    local told
    told=$(timeout --signal=KILL 20 scontrol show job --oneliner "$1" 2>/dev/null |
        sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p') || true
    if [[ -z $told || $told == COMPLETING ]]; then # forgotten, after a few minutes
        told=$(timeout --signal=KILL 20 sacct --noheader --parsable2 --allocations --format=State --jobs="$1" 2>/dev/null |
            sed -n '$s/^\([A-Z_]*\).*/\1/p') || true
    fi
    echo "$told"
}

ask_slurm() { # sets state, reason and preempted: what Slurm says of this job, of which it may not yet say that it ends
    local told attempt id=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID-}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    if [[ ${chain[scheduler]} != slurm || -z $id ]]; then return 0; fi
    for attempt in 1 2 3; do # a signal to the whole job ends `timeout`
        if told=$(timeout --signal=KILL 20 scontrol show job --oneliner "$id" 2>/dev/null); then break; fi
        if ((attempt == 3)); then return 0; fi
    done
    state=$(sed -n 's/.* JobState=\([^ ]*\).*/\1/p' <<<"$told")
    reason=$(sed -n 's/.* Reason=\([^ ]*\).*/\1/p' <<<"$told")
    preempted=$(sed -n 's/.* PreemptTime=\([^ ]*\).*/\1/p' <<<"$told")
}

state_word() { # how Slurm calls a job that ended so, once it says so; nothing for one that it does not end
    case $state/$reason/$preempted in
    COMPLETING/TimeLimit/*) echo TIMEOUT ;;
    COMPLETING/NodeDown/*) echo NODE_FAIL ;;
    RUNNING/*/[0-9]* | COMPLETING/*/[0-9]*) echo PREEMPTED ;;
    COMPLETING/None/*) echo CANCELLED ;;
    RUNNING/* | COMPLETING/* | /*) ;;
    *) echo "$state" ;;
    esac
}

last_step() { # last_step EVIDENCE: that our trainer tells of, a progress bar, or Megatron-LM
    local found
    found=$(grep -aEo '(^|: )step +[0-9]{1,15}/[0-9]+ \||\| *[0-9]{1,15}/[0-9]+ \[|iteration +[0-9]{1,15}/' "$1" 2>/dev/null | tail -n 1 | grep -Eo '[0-9]+' | head -n 1) || true
    if [[ $found ]]; then echo "$((10#$found))"; fi
}

gather() { # gather JOB SINCE: what it left to judge it by, in a file; prints its name
    local file=$marks/.$life.evidence
    evidence "$2" "${chain[failures]}" "${chain[log]}$1".out "${chain[log]}$1".err >"$file" || true
    echo "$file"
}

has_to_go_on() { # whether tasks that ended with 0, as of a training that is done, saved and left because they were told to
    local left said='Received SIGTERM, saving checkpoint|Time limit reached\. Elapsed time' # NeMo's words
    said+='|exiting program after (receiving SIGTERM|[0-9.]+ minutes)'                         # Megatron-LM's
    if [[ ${chain[save_signal]} != TERM ]]; then return 1; fi
    left=$(gather "${life%.*}" "${chain[began]}")
    if grep -aEq 'max_steps=[0-9]+. reached' "$left" || ! { [[ ${signalled-} ]] || grep -aEq "$said" "$left"; }; then
        rm -f "$left" || true
        return 1
    fi
    rm -f "$left" || true
    say "it is not done: its tasks saved and left${signalled:+ when they were sent $signalled}"
}

judge_link() { # judge_link JOB CODE HOSTS SINCE: sets verdict, why, rank, host, step, rule and nodes; CODE may not be known
    local code=$2 hosts=$3 left line='' blamed='' means='' failures=$((chain[failures_before] + 1))
    if [[ -e $marks/$1.cancelled.json || -e $marks/${1%_*}.cancelled.json ]]; then state='CANCELLED' reason='' preempted=''; fi
    rule=unknown verdict='continue' means='nothing is known of its end'
    left=$(gather "$1" "$4")
    if [[ -f $launch_dir/failure_rules.tsv ]]; then
        judge "$launch_dir/failure_rules.tsv" \
            "code=${code:--} state=${state:--} reason=${reason:--} preempted=${preempted:--} signal=${signalled:--} save=${chain[save_signal]:--}" \
            "${hosts//,/ }" "${chain[tasks_per_node]}" "$left" || true
    fi
    why=$means nodes='' rank='' host=''
    if [[ $verdict == exclude ]]; then nodes=${blamed// /,}; fi
    step=$(last_step "$left") || true
    if [[ $verdict != 'done' && $code != 75 ]]; then
        line=$(grep -aEm 1 '^\{"time": .*"rank": [0-9]+|^srun: error: [^ ]+: tasks? [0-9]' "$left") || true
        host=$(named_in "$line" "${hosts//,/ }" "${chain[tasks_per_node]}") || true
        rank=$(grep -aEo '("rank": |: tasks? )[0-9]{1,9}' <<<"$line" | head -n 1 | grep -aEo '[0-9]+$') || true
    fi
    rm -f "$left" || true
    case $verdict in
    'done' | stop) ;;
    *) # a job that was preempted goes on as often as it likes
        if ((chain[links] > 1 && failures >= chain[max_failures])) && [[ $rule != preempted ]] &&
            ! got_on "$(newest_checkpoint)" "${chain[checkpoint_before]}"; then
            verdict='stop' nodes=''
            if ((failures == 1)); then why="it ended without a new checkpoint: $why"; else
                why="$failures links in a row ended without a new checkpoint: $why"
            fi
        fi
        ;;
    esac
}

judged() { # what `judge` found, for a mark
    local name
    for name in rank step; do
        if [[ ${!name} ]]; then printf ', "%s": %s' "$name" "$((10#${!name}))"; fi
    done
    for name in host rule verdict why; do
        if [[ ${!name} ]]; then printf ', "%s": "%s"' "$name" "$(plain "${!name}")"; fi
    done
    if [[ $nodes ]]; then printf ', "excluded": "%s"' "$(plain "$nodes")"; fi
}
