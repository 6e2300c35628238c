#!/bin/bash
# T5 220M on 2 nodes; ./1.bmk-pretrain.sh says what else can be set, and does it.
set -euo pipefail

export MODEL=t5 MODEL_SIZE=220m
export NUM_NODES=${NUM_NODES:-2} RUNTIME=${RUNTIME:-30m} MAX_STEPS=${MAX_STEPS:-40}
# Each launch to a directory of its own, results-<TIMESTAMP>/:
#export UNIQUE_OUTPUT_DIR=1

exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/1.bmk-pretrain.sh" "$@"
