#!/bin/bash
# gpu-wheels.sh [PYTHON_VERSION]: collects what gpu-measure.sh needs beside PyTorch and numpy, for another machine
# (default: its Python is 3.12) in .cache/gpu-wheels. The versions are those of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

training='megatron-core|psutil|pyyaml|packaging'
launcher='hydra-core|omegaconf|jinja2|markupsafe|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions'
launcher+='|submitit|cloudpickle|rich|pygments|markdown-it-py|mdurl|filelock'
mapfile -t packages < <(.venv/bin/pip freeze | grep -iE "^($training|$launcher)==")
platforms=()
for glibc in 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
rm -rf .cache/gpu-wheels
.venv/bin/pip download --quiet --no-deps --only-binary=:all: --python-version "${1:-3.12}" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --dest .cache/gpu-wheels "${packages[@]}"
# omegaconf's parser has no wheel.
.venv/bin/pip wheel --quiet --no-deps --wheel-dir .cache/gpu-wheels \
    "$(.venv/bin/pip freeze | grep antlr4-python3-runtime)"
du -sh .cache/gpu-wheels
