#!/bin/bash
# venv.sh PYTHON EXTRAS: makes or updates .venv with slipway and its extras.
set -euo pipefail

python=$1 extras=$2

command -v "$python" >/dev/null || scripts/system-packages.sh "$python:python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 ..." >&2
    exit 1
}
# Debian packages ensurepip apart from Python; no program tells whether it is there.
"$python" -c 'import ensurepip' 2>/dev/null || scripts/system-packages.sh ensurepip:python3-venv

[[ -x .venv/bin/python ]] || "$python" -m venv .venv
# Where megatron-core has no wheel (Python 3.14), its build runs the `python3` of PATH.
export PATH=$PWD/.venv/bin:$PATH
echo "Installing slipway[$extras] into .venv; the first time this takes minutes, torch being large"
quiet=--quiet
[[ ! -t 1 ]] || quiet= # pip's own progress, for people
.venv/bin/pip install ${quiet:+"$quiet"} --use-pep517 --disable-pip-version-check -c constraints.txt -e ".[$extras]"
