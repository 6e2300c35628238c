#!/bin/bash
# What the job script reads to be one link of a chain of jobs: what came before, what comes next, which nodes to avoid.
# It says, marks and claims with the script's own functions; `judge_link` is in ending.sh.
# shellcheck disable=SC2034,SC2154 # set or used in the script and in ending.sh

declare -A chain=()
submitted_with=() # the variables that this job was submitted with, from before anything else is exported

chain_is() { # chain_is NAME=VALUE ...: what the configuration says of the chain
    local setting
    : "${job_id:?}" "${life:?}" "${launch_dir:?}" "${marks:?}" "${tag:?}" "${link:?}"
    for setting in "$@"; do chain["${setting%%=*}"]=${setting#*=}; done
    submitted_with=()
    while IFS= read -r -d '' setting; do submitted_with+=("$setting"); done < <(env -0) # `mapfile -d` is of bash 4.4
    chain[began]=$(now) chain[failures_before]=0 chain[checkpoint_before]=''
}

# --- what is known ---

now() { printf '%(%s)T' -1; } # in Unix seconds; bash's own: what Slurm signals with the job is no `date`

newest_checkpoint() { # the highest step of a finished checkpoint; nothing where there is none
    local directory=${chain[checkpoints]} entry name step='' newest=''
    [[ $directory ]] || return 0
    read -r step 2>/dev/null <"$directory/latest_checkpointed_iteration.txt" || true # its line has no end
    if [[ $step =~ ^[0-9]+$ ]]; then newest=$((10#$step)); fi                        # Megatron-LM's
    for entry in "$directory"/*step=* "$directory"/{mp,tp}_rank_*/*step=*; do
        name=${entry##*/} name=${name%.ckpt}
        if [[ ! -e $entry || $name == *-unfinished || -e $directory/$name-unfinished ]]; then continue; fi
        if [[ $name =~ (^|[^[:alnum:]_])step=([0-9]+) ]]; then
            step=$((10#${BASH_REMATCH[2]}))
            if [[ -z $newest ]] || ((step > newest)); then newest=$step; fi
        fi
    done
    echo "$newest"
}

field() { # field NAME FILE: a value of a mark
    sed -n -e 's/.*"'"$1"'": "\([^"]*\)".*/\1/p' -e 's/.*"'"$1"'": \([0-9][0-9.]*\).*/\1/p' "$2" 2>/dev/null | head -n 1
}

whole() { # whole TEXT: a whole number; 0 where it is none
    if [[ ${1%%.*} =~ ^[0-9]+$ ]]; then echo "${1%%.*}"; else echo 0; fi
}

plain() { # plain TEXT: fit for a mark, which is JSON
    local LC_ALL=C
    local text=${1//[^ -~]/?}
    text=${text//\\/?}
    echo "${text//\"/\'}"
}

claim_of() { # claim_of LINK: the file with the id of its job
    if (($1 == 1)); then echo "$marks/job"; else echo "$marks/job.$1"; fi
}

job_of() { # job_of LINK: its id; nothing as long as there is none
    local id=''
    read -r id 2>/dev/null <"$(claim_of "$1")" || true
    # Where there is no room for a claim the link itself knows whom it has submitted.
    if [[ -z $id ]] && (($1 == link + 1)); then id=${chain[next_job]-}; fi
    if [[ $id =~ ^[0-9]+$ ]]; then echo "$id"; fi
}

later_jobs() { # the ids of the links to come: of one, unless all were submitted at launch
    local later
    for ((later = link + 1; later <= chain[links]; later++)); do job_of "$later"; done
}

newest_mark() { # newest_mark JOB NAME: that of the job's last life
    local path newest=''
    for path in "$marks/$1".[0-9]."$2.json" "$marks/$1".[0-9][0-9]."$2.json"; do
        if [[ -f $path ]]; then newest=$path; fi
    done
    echo "$newest"
}

got_on() { # got_on NOW BEFORE: whether there is a newer checkpoint
    [[ $1 ]] && { [[ -z $2 ]] || (($1 > $2)); }
}

# --- nodes to stay away from ---

excluded() { # the tree's own, and those that failed under this run a short time ago
    local names
    names=${chain[exclude]},$(awk -F '\t' -v now="$(now)" \
        '$2 + 0 > now + 0 && $1 ~ /^[A-Za-z0-9][A-Za-z0-9._-]*$/ && !seen[$1]++ { printf "%s%s", comma, $1; comma = "," }' \
        "${chain[run_dir]}/excluded_nodes.tsv" 2>/dev/null) || true
    names=${names#,}
    echo "${names%,}"
}

exclude() { # exclude NODES WHY [JOB]: no job of this run runs there for a while, if Slurm can do without; else it is said
    # They failed under that job, if it is not this one.
    local until names node told='' later=()
    ((chain[exclude_seconds] > 0)) || return 1
    names=$(excluded)
    if ! command -v sbatch >/dev/null || ! told=$(as_submitted timeout --signal=KILL 20 sbatch --test-only \
        --exclude="${names:+$names,}$1" "${chain[script]}" "$tag" 2>&1); then
        say "does not exclude $1: whether Slurm can do without it could not be asked, or it cannot${told:+: $(plain "${told##*$'\n'}")}"
        return 1
    fi
    until=$(($(now) + chain[exclude_seconds]))
    for node in ${1//,/ }; do
        if ! printf '%s\t%s\t%s\t%s\n' "$node" "$until" "${3:-$job_id}" "$(plain "$2")" >>"${chain[run_dir]}/excluded_nodes.tsv"; then
            say "does not exclude $1: ${chain[run_dir]}/excluded_nodes.tsv could not be written"
            return 1
        fi
    done
    say "excludes $1 until $(printf '%(%F %H:%M)T' "$until"): $2"
    mapfile -t later < <(later_jobs)
    ((${#later[@]})) || return 0
    told=$(IFS=, && echo "${later[*]}")
    if ! timeout --signal=KILL 30 scontrol update JobId="$told" ExcNodeList="$(excluded)"; then
        say "job $told may run on $1 all the same: Slurm did not take the change"
    fi
}

# --- the next link ---

as_submitted() { # as_submitted COMMAND ...: in the environment that this job was submitted from
    (
        # In no variables: any name may be one of the user's.
        set -- "${SLURM_CONF-}" "${SLURM_SUBMIT_DIR-}" "${SLURM_JOB_GPUS-}" "$@"
        # Functions are exported under names that are none, and stay.
        while IFS= read -r -d '' variable; do unset "${variable%%=*}" 2>/dev/null || true; done < <(env -0)
        for variable in "${submitted_with[@]}"; do
            case $variable in
            SLURM_* | SLURMD_* | SBATCH_*) ;;
            CUDA_VISIBLE_DEVICES=* | ROCR_VISIBLE_DEVICES=* | GPU_DEVICE_ORDINAL=* | ZE_AFFINITY_MASK=*)
                if [[ -z $3 ]]; then export "${variable?}"; fi # else Slurm has set it, for this job
                ;;
            *) export "${variable?}" 2>/dev/null || true ;;
            esac
        done
        if [[ $1 ]]; then export SLURM_CONF=$1; fi
        if [[ $2 ]]; then cd "$2" 2>/dev/null || true; fi
        exec "${@:4}"
    )
}

find_next() { # the id of the next link's job, where sbatch did not say whether there is one
    local id command
    while IFS='|' read -r id command; do # since Slurm 23.02 without the script's arguments
        if [[ $command == *"/submitted/$tag.$((link + 1))_submission.sh"* ]]; then echo "$id" && return; fi
    done < <(as_submitted timeout --signal=KILL 30 squeue --noheader --user="$(id -u)" --format='%A|%o' 2>/dev/null)
}

name_script() { # name_script LINK: the name that a link's script is submitted under, by which Slurm tells whose job it is
    local named=${chain[script]%/*}/submitted/$tag.$1_submission.sh
    mkdir -p "${named%/*}" || true
    [[ -e $named ]] || ln -s "../${chain[script]##*/}" "$named" 2>/dev/null || [[ -e $named ]] ||
        cp "${chain[script]}" "$named" || named=${chain[script]} # no links on this file system; no room
    echo "$named"
}

submit_next() { # submit the next link, once: before all else, so that a node that dies does not end the chain
    local next=$((link + 1)) attempt told id avoid given script
    if ((next > chain[links])) || [[ ${chain[submit]} != job || -e $marks/chain-ended || $(job_of "$next") ]]; then
        return 0
    fi
    given=(--parsable --dependency="afterany:$SLURM_JOB_ID${chain[singleton]:+,singleton}" --kill-on-invalid-dep=yes)
    if [[ ${chain[begin]} ]]; then given[4]=--begin=now; fi # it was for the first
    avoid=$(excluded) script=$(name_script "$next")
    for attempt in 1 2 3; do
        unset 'given[3]' # of the attempt before
        if [[ $avoid || ${chain[header_excludes]} ]]; then given[3]=--exclude=$avoid; fi # in place of the header's
        told=$(as_submitted timeout --signal=KILL 120 sbatch "${given[@]}" "$script" "$next" "$tag" 2>&1) || true
        id=$(sed -n 's/^\([0-9][0-9]*\)\(;.*\)\{0,1\}$/\1/p' <<<"$told" | tail -n 1)
        [[ $id ]] || id=$(find_next)
        if [[ $id ]]; then
            chain[next_job]=$id
            claim "$(claim_of "$next")" "$id"
            say "link $next of at most ${chain[links]} is job $id, which waits for the end of this one"
            return 0
        fi
        say "link $next could not be submitted: $(plain "${told##*$'\n'}")"
        avoid=${chain[exclude]} # a node that has left the cluster since is no node to Slurm
        if ((attempt < 3)); then sleep "$attempt"; fi
    done
    return 1
}

end_chain() { # end_chain WHY: no link that has not begun does anything; who ends it first is on record
    local later=()
    ((chain[links] > 1)) || return 0
    if ! { printf '{"by": "job %s", "why": "%s", "ended": %s}\n' "$job_id" "$(plain "$1")" "$(now)" >"$marks/.$life.end" && {
        ln "$marks/.$life.end" "$marks/chain-ended" 2>/dev/null || [[ -e $marks/chain-ended ]] ||
            mv "$marks/.$life.end" "$marks/chain-ended" # no links on this file system
    }; }; then
        say "could not leave the mark $marks/chain-ended"
    fi
    rm -f "$marks/.$life.end" || true
    mapfile -t later < <(later_jobs)
    if ((${#later[@]} == 0)) && [[ ${chain[submit]} == job ]]; then mapfile -t later < <(find_next); fi
    ((${#later[@]})) || return 0
    # All at once: a Slurm that does not answer is waited for once.
    timeout --signal=KILL 30 scancel "${later[@]}" 2>/dev/null || say "job ${later[*]} leaves by itself when it begins"
}

# --- what the script calls ---

tidy() { # what jobs that were killed left of NeMo's checkpoints
    if [[ ${chain[engine]} == nemo && ${chain[checkpoints]} ]]; then tidy_nemo_checkpoints "${chain[checkpoints]}" || true; fi
}

begin_link() { # see what came before, and submit what comes next
    tidy
    chain[checkpoint_now]=$(newest_checkpoint)
    if ((link > 1)); then look_back || true; fi
    chain[checkpoint_before]=${chain[checkpoint_now]}
    submit_next || say "tries once more to submit the next link when its tasks have ended"
}

look_back() { # how many links before got nowhere, and whether there is a point in going on
    local earlier job='' path='' missing=0 started='' ended='' state reason='' preempted='' signalled=''
    local verdict='' why='' rank='' host='' step='' rule='' nodes=''
    for ((earlier = link - 1; earlier >= 1; earlier--)); do
        job=$(job_of "$earlier")
        started=$(newest_mark "${job:-none}" started) ended=$(newest_mark "${job:-none}" ended)
        path=${started:-$ended}
        if [[ $path ]]; then break; fi
        missing=$((missing + 1)) # it left nothing: it never began, or its node died before it could
    done
    if [[ $path ]]; then
        chain[failures_before]=$(whole "$(field failures "$path")")
        chain[checkpoint_before]=$(field checkpoint "$path")
    fi
    # The last one's part comes below, whatever it left.
    chain[failures_before]=$((chain[failures_before] + missing - (missing > 0 && ${#path} == 0)))
    if ((missing > 0)); then started='' ended=''; fi # of one before it
    job=$(job_of $((link - 1)))
    state=$([[ -z $job ]] || slurm_state "$job")
    if [[ $ended ]]; then verdict=$(field verdict "$ended"); fi
    if [[ $verdict ]]; then
        rule=$(field rule "$ended") why=$(field why "$ended") state=${state:-$(field state "$ended")}
        # By now Slurm knows who ended it.
        if [[ $state == CANCELLED && $verdict != 'done' ]]; then verdict='stop' why='it was cancelled'; fi
    elif [[ $job ]]; then
        judge_link "$job" "$([[ -z $ended ]] || field exit_code "$ended")" "$(field nodes "${started:-/dev/null}")" "$(whole "$(field started "${started:-/dev/null}")")"
        say "the link before, job $job, left no word: $why"
        if [[ $started ]]; then
            (set -o noclobber && printf '{"job_id": "%s", "link": %s, "judged_by": "job %s"%s%s}\n' "$job" $((link - 1)) "$job_id" \
                "${state:+, \"state\": \"$state\"}" "$(judged)" >"${started%.started.json}.ended.json") 2>/dev/null || true
        fi
        if [[ $verdict == exclude ]]; then exclude "$nodes" "$why" "$job" || true; fi
    fi
    if [[ $verdict == stop || $verdict == 'done' ]]; then
        end_chain "job $job: $why"
        say "leaves without doing anything: the chain has ended with job $job: $why"
        trap - EXIT
        exit 0
    fi
    if got_on "${chain[checkpoint_now]}" "${chain[checkpoint_before]}"; then
        chain[failures_before]=0
    elif [[ $state != PREEMPTED && $rule != preempted ]]; then
        chain[failures_before]=$((chain[failures_before] + 1))
    fi
}

place_in_chain() { # for the marks: which link this is, and from where it started
    local avoided
    avoided=$(excluded)
    printf '"link": %s, "failures": %s%s%s' "$link" "${chain[failures_before]}" \
        "${chain[checkpoint_before]:+, \"checkpoint\": ${chain[checkpoint_before]}}" "${avoided:+, \"avoids\": \"$(plain "$avoided")\"}"
}

end_link() { # end_link CODE: judge it, leave the mark, and see to the next link
    local code=$1 state='' reason='' preempted='' verdict='' why='' rank='' host='' step='' rule='' nodes='' word all=${hosts-}
    signalled=${signalled-}
    mark ended "\"exit_code\": $code, \"ended\": $(now), $(place_in_chain)" # should Slurm not answer in time
    ask_slurm || true
    judge_link "${life%.*}" "$code" "${all//$'\n'/,}" "${chain[began]}" || say "how it ended could not be told"
    word=$(state_word)
    mark ended "\"exit_code\": $code, \"ended\": $(now), $(place_in_chain)${word:+, \"state\": \"$(plain "$word")\"}${signalled:+, \"signal\": \"$signalled\"}$(judged)"
    case $verdict in
    'done' | stop)
        say "$verdict: $why"
        end_chain "$why"
        if [[ $verdict == 'done' ]]; then tidy; fi # for whoever reads its checkpoints next
        ;;
    *)
        say "$why"
        if [[ $verdict == exclude ]]; then exclude "$nodes" "$why" || true; fi
        submit_next || say "the chain ends here: its next link could not be submitted"
        if ((chain[links] > 1 && link >= chain[links])); then say "the chain ends here: it was to have ${chain[links]} links"; fi
        ;;
    esac
}
