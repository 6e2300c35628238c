#!/bin/bash
# launch.sh [OVERRIDE ...]: `slipway launch` with the trees beside this file in front of Slipway's own.
# Works from any directory; the last of two values for one key wins, so that arguments win over the lines below.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

overrides=(
    cluster=mine       # conf/cluster/mine.yaml
    training=gpt3/mine # conf/training/gpt3/mine.yaml
    # data/ and results/ are here too, unless you say data_dir=... or base_results_dir=...
    "launcher_scripts_path='${here//\'/\\\'}'"
    # "container_mounts=[/lustre,/datasets:/data:ro]"
    # env_vars.NCCL_DEBUG=INFO
)
exec slipway launch --config-dir "$here/conf" --template-dir "$here/templates" "${overrides[@]}" "$@"
