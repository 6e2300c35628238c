#!/bin/bash
# Times the pretraining of one model size on mock data: no validation, no checkpoint, nothing resumed.
#
#   TARGET_PATH=/fsx/nemo ENROOT_IMAGE=/apps/nemo.sqsh NUM_NODES=4 benchmarks/1.bmk-pretrain.sh cluster=bcm
#
# Needed:
#   TARGET_PATH        a directory that all nodes share; data/ and results/ are below it, and if you have one your own
#                      tree of configurations, launcher_scripts/conf/
#   ENROOT_IMAGE       the image: a .sqsh file, or as Pyxis takes it; null for bare metal
# Optional, with their defaults:
#   MODEL=gpt3 MODEL_SIZE=126m NUM_NODES=2
#   RUNTIME=30m        the job's time limit: 30m, 1h30m, 2d, or as Slurm takes it (1-00:00:00)
#   MAX_STEPS=40
#   GLOBAL_BATCH_SIZE  the size's own; set it where that does not divide among the GPUs
#   UNIQUE_OUTPUT_DIR=0   1 writes to results-<TIMESTAMP>/ instead of results/
#   TRANSFORMERS_OFFLINE=0
# Arguments are overrides and options of `slipway launch`; they come last, so they win:
#   cluster=bcm cluster.partition=p5 training.model.micro_batch_size=2 --dry-run
set -euo pipefail

: "${TARGET_PATH:?set it to a directory that all nodes share}"
: "${ENROOT_IMAGE:?set it to the image, such as /apps/nemo.sqsh, or to null for bare metal}"
: "${MODEL:=gpt3}" "${MODEL_SIZE:=126m}" "${NUM_NODES:=2}" "${RUNTIME:=30m}" "${MAX_STEPS:=40}"
: "${UNIQUE_OUTPUT_DIR:=0}" "${TRANSFORMERS_OFFLINE:=0}"

# 30m, 1h30m and the like as Slurm's hours:minutes:seconds; anything else is Slurm's already.
time_limit() {
    if [[ ! $1 =~ ^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$ ]]; then
        printf '%s' "$1"
        return
    fi
    local days=${BASH_REMATCH[1]%d} hours=${BASH_REMATCH[2]%h}
    local minutes=${BASH_REMATCH[3]%m} seconds=${BASH_REMATCH[4]%s}
    # 10#: 08 is a number, not a mistake in octal.
    local all
    all=$(((10#${days:-0} * 24 + 10#${hours:-0}) * 3600 + 10#${minutes:-0} * 60 + 10#${seconds:-0}))
    if ((all == 0)); then
        echo "RUNTIME=$1: a time is needed" >&2 # to Slurm, 0 is no limit
        exit 2
    fi
    printf '%02d:%02d:%02d' $((all / 3600)) $((all / 60 % 60)) $((all % 60))
}

# Text as Hydra reads it back unchanged.
quoted() {
    printf "'%s'" "${1//\'/\\\'}"
}

limit=$(time_limit "$RUNTIME")

args=(
    'stages=[training]'
    "training=$MODEL/$MODEL_SIZE"
    "training.trainer.num_nodes=$NUM_NODES"
    "training.run.time_limit=$(quoted "$limit")"
    "training.trainer.max_steps=$MAX_STEPS"

    "launcher_scripts_path=$(quoted "$TARGET_PATH")"
    "base_results_dir=$(quoted "$TARGET_PATH/results")"
    "unique_output_dir=$UNIQUE_OUTPUT_DIR"
    "container=$ENROOT_IMAGE"
    "env_vars.TRANSFORMERS_OFFLINE=$TRANSFORMERS_OFFLINE"

    # Only the training is timed, so its schedule does not matter.
    --no-check=schedule.warmup
    "training.trainer.val_check_interval=$MAX_STEPS"
    training.trainer.limit_val_batches=0.0
    training.exp_manager.create_checkpoint_callback=False
    training.exp_manager.resume_if_exists=False
    training.model.data.data_impl=mock
    'training.model.data.data_prefix=[]'
)
# A tree of one's own goes in front of Slipway's.
if [[ -d $TARGET_PATH/launcher_scripts/conf ]]; then
    args+=("--config-dir=$TARGET_PATH/launcher_scripts/conf")
fi
if [[ -n ${GLOBAL_BATCH_SIZE:-} ]]; then
    args+=("training.model.global_batch_size=$GLOBAL_BATCH_SIZE")
fi

# The `slipway` of the PATH, or this checkout's.
if command -v slipway > /dev/null; then
    launch=(slipway launch)
else
    checkout=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/..
    python=$checkout/.venv/bin/python
    [[ -x $python ]] || python=python3
    launch=("$python" "$checkout/launcher/main.py")
fi
exec "${launch[@]}" "${args[@]}" "$@"
