#!/bin/bash
# nemo-env.sh PYTHON: makes or updates the environment of tests/nemo (2 GB), NeMo on a CPU.
#   SLIPWAY_NEMO_ENV   where (default: .venv-nemo)
set -euo pipefail

python=$1
target=${SLIPWAY_NEMO_ENV:-.venv-nemo}
wanted=tests/nemo/requirements.txt

# The copy is made last, so it stands for an environment that is whole.
! cmp --silent "$wanted" "$target/requirements.txt" || exit 0

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || {
    echo "NeMo 2.4 needs Python 3.10, 3.11 or 3.12; name one: make nemo-test PYTHON=python3.11" >&2
    exit 1
}
[[ -x $target/bin/python ]] || "$python" -m venv "$target"
echo "Installing NeMo into $target; this takes minutes"
quiet=--quiet
[[ ! -t 1 ]] || quiet= # pip's own progress, for people
# Without their dependencies: those that are missing from the list want a GPU, or a compiler.
"$target/bin/pip" install ${quiet:+"$quiet"} --disable-pip-version-check --no-deps -r "$wanted"
cp "$wanted" "$target/requirements.txt"
