#!/bin/bash
# attach.sh TAG RANK [COMMAND ARGUMENT ...]: runs COMMAND, by default a shell, where a rank of a running launch runs:
# in its container when it has one, in its working directory, with its environment. `slipway attach` runs this on the
# rank's node. TAG is the launch's own; RANK may be `any` of this node.
set -euo pipefail
set +xv # a SHELLOPTS in the environment would print the values of secrets
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means

tag=$1 rank=$2
shift 2
(($#)) || set -- bash
pattern=RANK=$rank
[[ $rank != any ]] || pattern='RANK=[0-9][0-9]*'
node=SLURMD_NODENAME=${SLURMD_NODENAME-} # a machine may be several nodes
[[ $node != *= ]] || node='.*'

# The rank itself is the oldest process with what task.sh exports; its helpers, and shells that were attached before,
# have the same environment. Only one's own processes can be read, and some end meanwhile.
shopt -s nullglob
with() { # with PATTERN ..., of the environments on stdin
    xargs -r grep -lsz "$@" || true
}
pid=$(printf '%s\n' /proc/[0-9]*/environ | with -Fxe "SLIPWAY_TAG=$tag" | with -xe "$pattern" | with -xe "$node" |
    while IFS=/ read -r _ _ process _; do
        { stat=$(<"/proc/$process/stat"); } 2>/dev/null || continue
        read -ra fields <<<"${stat##*) }"
        echo "${fields[19]} $process" # the time at which it started
    done | sort -k 1,1n -k 2,2n | sed -n '1s/.* //p')
if [[ -z $pid ]]; then
    echo "There is no process of rank $rank on $(hostname): it starts just now, has ended, or is another user's" >&2
    exit 1
fi

if [[ $(readlink "/proc/$pid/ns/mnt") != "$(readlink /proc/self/ns/mnt)" ]]; then
    if grep -qsze '^APPTAINER_CONTAINER=' "/proc/$pid/environ"; then # only what it started itself can join it
        echo "Rank $rank runs in a container of Apptainer's, which nothing can join; on the node itself: --outside" >&2
        exit 1
    fi
    # A container of Enroot's, with a name or without one; its `exec` takes over the environment and the directory.
    exec enroot exec --env "TERM=${TERM:-dumb}" "$pid" "$@"
fi
# The environment becomes this shell's own: as arguments of `env` everybody could read it. What no shell exports is for
# `env`: functions and odd names, and what these lines themselves use.
environment=() others=("TERM=${TERM:-dumb}")
while IFS= read -r -d '' variable; do environment+=("$variable"); done <"/proc/$pid/environ"
cd "$(readlink "/proc/$pid/cwd")"
set -- "$(type -P env)" "$@"
for variable in $(compgen -e); do unset "$variable" 2>/dev/null || export -n "${variable?}"; done
for variable in $(compgen -A function); do unset -f "$variable"; done
for variable in "${environment[@]}"; do
    case $variable in
    [!A-Za-z_]* | TERM=* | SHELLOPTS=* | BASHOPTS=*) ;;
    environment=* | others=* | variable=* | POSIXLY_CORRECT=* | UID=* | EUID=* | PPID=* | BASH_*) others+=("$variable") ;;
    *) export "${variable?}" 2>/dev/null || others+=("$variable") ;;
    esac
done
exec "$1" "${others[@]}" "${@:2}"
