#!/bin/bash
# What the job script reads before NeMo starts: what jobs that were killed left of its checkpoints. It has set this:
: "${life:?}"

# NeMo refuses to start beside a second `-last`, or where the only one is half done, and deletes what is half done:
# all that goes into a directory beside. NeMo continues from a `-last` alone; where a whole checkpoint is newer, it
# is made one by hard links, which take no room.
tidy_nemo_checkpoints() { # tidy_nemo_checkpoints DIRECTORY || true: nothing in it may end the job
    local directory=${1%/} aside=${1%/}-set-aside/$life marker name moved path last newest new
    for marker in "$directory"/*-unfinished; do
        if [[ ! -f $marker ]]; then continue; fi
        name=${marker##*/} name=${name%-unfinished} moved=yes
        for path in "$directory/$name" "$directory/$name.ckpt" "$directory"/*/"$name.ckpt"; do
            if [[ -e $path ]]; then set_aside "$path" "a job ended while it wrote or removed it" || moved=no; fi
        done
        # Last: without its mark, what is half done would look whole.
        if [[ $moved == yes ]]; then set_aside "$marker"; fi
    done

    last=$(newest_whole "$directory"/*-last "$directory"/*-last.ckpt)
    newest=$(newest_whole "$directory"/*step=*)
    if [[ -d $newest ]] && (($(step_of "$newest") > $(step_of "$last"))); then
        new=$aside/.${newest##*/}
        if { mkdir -p "$aside" && cp -al -- "$newest" "$new" && mv -T -- "$new" "$newest-last"; } 2>/dev/null; then
            last=$newest-last
            say "NeMo continues from ${newest##*/}, which is newer than any \`-last\`: linked as ${last##*/}"
        else
            rm -rf -- "$new"
            say "could not make a \`-last\` of $newest, the newest checkpoint" >&2
        fi
        rmdir -- "$aside" "${aside%/*}" 2>/dev/null || true # unless something lies there
    fi
    for path in "$directory"/*-last "$directory"/*-last.ckpt; do
        if [[ -e $path && $path != "$last" && ! -e ${path%.ckpt}-unfinished ]]; then
            set_aside "$path" "NeMo takes one \`-last\` only, ${last##*/}"
        fi
    done
}

set_aside() { # set_aside PATH [WHY]: for tidy_nemo_checkpoints
    local to=$aside${1#"$directory"}
    while [[ -e $to ]]; do to+=.again; done # the life of a job tidies twice
    if ! { mkdir -p "${to%/*}" && mv -T -- "$1" "$to"; }; then
        say "could not set $1 aside" >&2
        return 1
    fi
    if [[ ${2:-} ]]; then say "set aside ${1##*/}, because ${2}: it is now $to"; fi
}

newest_whole() { # newest_whole PATH ...: the one of the highest step that is not marked unfinished
    local path step newest='' highest=-2
    for path; do
        if [[ ! -e $path || $path == *-unfinished || -e ${path%.ckpt}-unfinished ]]; then continue; fi
        step=$(step_of "$path")
        if ((step > highest)) || { ((step == highest)) && [[ $path -nt $newest ]]; }; then
            newest=$path highest=$step
        fi
    done
    echo "$newest"
}

step_of() { # step_of PATH: the step in a checkpoint's name, -1 without one
    if [[ ${1##*/} =~ step=0*([0-9]+) ]]; then echo "${BASH_REMATCH[1]}"; else echo -1; fi
}
