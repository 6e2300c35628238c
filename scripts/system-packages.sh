#!/bin/bash
# system-packages.sh [--optional] PROGRAM:PACKAGE ...
# Installs the Debian packages of those programs (or files) that are missing. Without root it names them;
# with --optional that is not an error.
set -euo pipefail

optional=0
if [[ ${1:-} == --optional ]]; then
    optional=1
    shift
fi

missing=()
for pair in "$@"; do
    program=${pair%%:*} package=${pair##*:}
    # Daemons are in sbin, which is not on everybody's PATH. A pattern stands for a file.
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || compgen -G "$program" >/dev/null || missing+=("$package")
done
((${#missing[@]})) || exit 0

install="apt-get install --no-install-recommends ${missing[*]}"
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "Missing on this machine: ${missing[*]} (as root: $install)" >&2
    exit $((1 - optional))
fi
echo "Installing with apt-get: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
