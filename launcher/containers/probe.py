"""Runs in an image's own Python, from 3.8 on, and prints what is installed there as JSON.

Nothing is imported that the image brings: some of it cannot be without a GPU.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib import metadata, util
from pathlib import Path

# What training people ask an image for, by the names of its distribution; the first that is there counts.
_DISTRIBUTIONS = {
    "torch": ["torch"],
    "nemo": ["nemo_toolkit"],
    "apex": ["apex", "nvidia_apex"],
    "transformer_engine": ["transformer_engine"],
    "megatron_core": ["megatron_core"],
    "lightning": ["pytorch_lightning", "lightning"],
    "flash_attn": ["flash_attn"],
}
# Where torch's version.py tells it.
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def version_of(names: list[str]) -> str | None:
    """The version that a distribution has by its metadata."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda() -> str | None:
    """The CUDA that torch was built with."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


if __name__ == "__main__":
    versions = {name: version_of(names) for name, names in _DISTRIBUTIONS.items()}
    json.dump({"python": platform.python_version(), **versions, "cuda": cuda()}, sys.stdout)
