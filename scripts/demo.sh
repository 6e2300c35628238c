#!/bin/bash
# From nothing to a trained model: each step is a command that you could type.
# DEMO_OVERRIDES='training.trainer.max_steps=400' changes the training.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { # show the command, then run it
    printf '\033[2m$ %s\033[0m\n' "$(printf '%q ' "$@")"
    "$@"
}
if [[ ! -t 1 ]]; then say() { printf '\n%s\n' "$*"; }; run() { printf '$ %s\n' "$(printf '%q ' "$@")"; "$@"; }; fi

export PATH=$PWD/.venv/bin:$PATH
results=results/demo/$(date +%Y%m%d-%H%M%S) # a place of its own: nothing of an earlier demo is touched
data=results/demo/data
read -ra further <<<"${DEMO_OVERRIDES:-}"

cluster=sandbox
if [[ $(id -u) != 0 ]]; then
    say "Not root: without it there is no Slurm of several nodes on one machine. The same training runs as processes (cluster=local)."
    cluster=local
elif ! PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null; then
    say "Slurm is not installed: the same training runs as processes (cluster=local)."
    cluster=local
fi

say "Text that is on every machine: modules of Python's standard library"
# Every Python from 3.10 on has these, each as one file: the demo trains on nearly the same text everywhere.
modules=(
    argparse ast base64 bdb calendar cmd codecs compileall configparser contextlib csv dataclasses difflib dis
    doctest enum fileinput fractions ftplib functools gettext gzip heapq imaplib inspect ipaddress locale lzma
    mailbox mimetypes modulefinder ntpath operator optparse os pdb pickle pickletools platform plistlib poplib
    posixpath pprint profile pstats pydoc queue random runpy sched selectors shelve shlex shutil smtplib socket
    socketserver ssl statistics stringprep subprocess symtable tarfile tempfile textwrap threading timeit tokenize
    trace traceback tracemalloc types typing uuid wave weakref webbrowser zipimport
)
files=("${modules[@]/#/$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/}")
mkdir -p "$data/text"
cp -f "${files[@]/%/.py}" "$data/text" || true # one that this Python lacks is no obstacle
run slipway data tokenize "$data/text" --pattern '*.py' --replace "data_dir=$data" "base_results_dir=$results"

if [[ $cluster == sandbox ]] && ! slipway sandbox status >/dev/null; then
    say "A real Slurm of four nodes, on this machine"
    if run slipway sandbox up; then
        trap 'say "The throw-away Slurm goes again"; run slipway sandbox down' EXIT
    else
        say "No Slurm here, as said above: the same training runs as processes (cluster=local)."
        cluster=local
    fi
fi

where="2 nodes × 2 tasks"
[[ $cluster == sandbox ]] || where="4 processes"
say "A small GPT-3 on $where: tensor parallel 2 × data parallel 2"
run python launcher/main.py training=gpt3/tiny "cluster=$cluster" "data_dir=$data" "base_results_dir=$results" \
    "${further[@]}" --follow
if [[ $cluster == sandbox ]]; then
    job=$(cut -d' ' -f4 "$results/gpt3_tiny/launcher.log")
    run env SLURM_CONF="$(slipway sandbox env | sed -n 's/^export SLURM_CONF=//p')" \
        squeue --states=all --jobs="$job" --Format=JobID:12,Name:28,State:12,NumNodes:8,NumTasks:8,NodeList:12
fi

say "What it learned"
run slipway plot "$results/gpt3_tiny"

if slipway generate --help >/dev/null 2>&1; then
    say "What it writes"
    run slipway generate "$results/gpt3_tiny" "def main(" --max-tokens 40
fi

say "All of it is in $results/gpt3_tiny. Next:"
printf '  %s\n' "slipway history $results/gpt3_tiny" \
    "slipway convert $results/gpt3_tiny          # to Hugging Face's format" \
    "python launcher/main.py training=gpt3/126m cluster=bcm --dry-run"
