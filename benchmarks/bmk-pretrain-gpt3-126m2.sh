#!/bin/bash
# GPT-3 126M on 2 nodes; ./1.bmk-pretrain.sh says what else can be set, and does it.
set -euo pipefail

export MODEL=gpt3 MODEL_SIZE=126m
export NUM_NODES=${NUM_NODES:-2} RUNTIME=${RUNTIME:-30m} MAX_STEPS=${MAX_STEPS:-40}
# Each launch to a directory of its own, results-<TIMESTAMP>/:
#export UNIQUE_OUTPUT_DIR=1

exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/1.bmk-pretrain.sh" "$@"
