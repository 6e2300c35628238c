"""A program for an image's own Python, from 3.8 on, that prints the installed versions, as JSON.

Nothing of the image is imported: some of it cannot be without a GPU.
"""

from __future__ import annotations

import sys

try:
    import json
    import platform
    import re
    from importlib import metadata, util
    from pathlib import Path
except ImportError as error:
    sys.exit(f"it is a Python without its standard library, such as that of python3-minimal: {error}")

# Packages for training, by the names of their distributions; the first that is there counts.
_DISTRIBUTIONS = {
    "torch": ["torch"],
    "nemo": ["nemo_toolkit"],
    "apex": ["apex", "nvidia_apex"],
    "transformer_engine": ["transformer_engine"],
    "megatron_core": ["megatron_core"],
    "lightning": ["pytorch_lightning", "lightning"],
    "flash_attn": ["flash_attn"],
}
# NeMo's Megatron programs by type of model, and the modules that they import.
_TYPES = ("bert", "gpt", "t5")
_MODELS = "collections/nlp/models/language_modeling/megatron_{}_model.py"
_SCRIPTS = "examples/nlp/language_modeling/megatron_{}_pretraining.py"
_NEMO = Path("/opt/NeMo")  # where NVIDIA's images have its repository
# In torch's version.py.
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def version_of(names: list[str]) -> str | None:
    """Return the version in a distribution's metadata."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda() -> str | None:
    """Return the version of CUDA that torch was built with."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        match = _CUDA.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1] if match else None


def nemo_files() -> dict[str, str | None]:
    """Return the types of models in NeMo's package, and those that have training programs."""
    spec = util.find_spec("nemo")
    places = spec.submodule_search_locations if spec is not None else None
    packages = [Path(place) for place in places or ()]
    return {
        "nemo_models": _types(packages, _MODELS),
        "nemo_scripts": _types([_NEMO, *(package.parent for package in packages)], _SCRIPTS),
    }


def _types(directories: list[Path], name: str) -> str | None:
    types = [kind for kind in _TYPES if any((path / name.format(kind)).is_file() for path in directories)]
    return " ".join(types) or None


if __name__ == "__main__":
    versions = {name: version_of(names) for name, names in _DISTRIBUTIONS.items()}
    json.dump({"python": platform.python_version(), **versions, "cuda": cuda(), **nemo_files()}, sys.stdout)
