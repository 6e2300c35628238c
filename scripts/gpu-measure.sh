#!/bin/bash
# gpu-measure.sh [DIRECTORY [--smoke]]: gpu_step.py and gpu_check in 9 minutes, on a machine with a GPU, PyTorch and
# numpy; the other packages are those of gpu-wheels.sh. Nothing is installed but in .cache. --smoke: on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=$(realpath -m "${1:-results/gpu_measure}") smoke=${2:-} python=${PYTHON:-python3} code=0
checks=versions,devices,dropout
[[ -n $smoke ]] || checks+=,throughput,resume,parity,precision
"$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links .cache/gpu-wheels --no-deps \
    --upgrade --target .cache/gpu-site .cache/gpu-wheels/*.whl
export PYTHONPATH=$PWD/.cache/gpu-site PYTHONUNBUFFERED=1
# A second call compiles nothing.
export TORCHINDUCTOR_CACHE_DIR=$PWD/.cache/gpu-compiled TRITON_CACHE_DIR=$PWD/.cache/gpu-compiled/triton
"$python" benchmarks/perf/gpu_step.py --minutes 5.5 --directory "$directory" ${smoke:+"$smoke"} || code=$?
# Its rows so far are in gpu_check.json when time is over.
timeout $((530 - SECONDS)) "$python" -m benchmarks.gpu_check --only "$checks" \
    --directory "$directory/gpu_check" || code=$?
exit "$code"
