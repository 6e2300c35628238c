"""The libraries that the interpreter must have, looked for before the first of them is imported."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from slipway.common.errors import UserError
from slipway.common.extras import install_command

TRAINING = ("torch", "megatron.core", "numpy", "psutil", "yaml")
TENSORBOARD = ("tensorboard",)
# What pip calls those that it does not call by the module's name.
_PACKAGES = {"megatron.core": "megatron-core", "yaml": "pyyaml", "google.protobuf": "protobuf"}


# megatron-core changes its interfaces in each minor version, and the shim names its modules.
_CORE = ((0, 16), (0, 17))
_OLDEST_TORCH = (2, 8)
# Megatron-LM's own pins at core_v0.16.1 (pyproject.toml); others may do.
_TRIED = {"transformer_engine": ((2, 9), (2, 12)), "torch": (_OLDEST_TORCH, (2, 14))}


def check_versions() -> None:
    """Hold the versions of megatron-core and torch against those that this trainer is written for.

    Raises
    ------
    UserError
        If megatron-core is not 0.16, or torch is older than megatron-core 0.16's interfaces need.
    """
    core, torch = _parse_version("megatron-core"), _parse_version("torch")
    if core and not _CORE[0] <= core[1] < _CORE[1]:
        problem = f"has megatron-core {core[0]}: engine=megatron is written for 0.16"
    elif torch and torch[1] < _OLDEST_TORCH:
        problem = f"has torch {torch[0]}: engine=megatron needs 2.8 or newer"
    else:
        return
    raise UserError(
        f"{sys.executable} {problem}; install it there ({install_command('train')}), "
        "or choose an interpreter or an image that has it (cluster.python=..., "
        "container=...); a NeMo image's own megatron-core is for engine=nemo",
        found_by="node",
    )


def list_untested() -> list[str]:
    """Return a note for each library whose version is beyond those that were tried."""
    notes = []
    for package, (first, end) in _TRIED.items():
        installed = _parse_version(package)
        if installed and not first <= installed[1] < end:
            tried = f"{'.'.join(map(str, first))} to below {'.'.join(map(str, end))}"
            notes.append(f"note: {package} {installed[0]}: not tested with this trainer; {tried} are")
    return notes


def version(package: str) -> str | None:
    """Return an installed package's version; None if it is unknown."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _parse_version(package: str) -> tuple[str, tuple[int, ...]] | None:
    """Return a package's version as text and its first two numbers; None if it is unknown."""
    text = version(package)
    match = re.match(r"(\d+)\.(\d+)", text) if text else None
    return (text, (int(match[1]), int(match[2]))) if text and match else None


def check(modules: Sequence[str], way_out: str = "", extra: str = "train") -> None:
    """Look for modules without importing them.

    Parameters
    ----------
    way_out
        What would do without them, if anything.
    extra
        The extra of this package that has them.

    Raises
    ------
    UserError
        Naming those that are missing, and the interpreter.
    """
    missing = [_PACKAGES.get(module, module) for module in modules if not _is_there(module)]
    if missing:
        raise UserError(
            f"{sys.executable} lacks {', '.join(missing)}: install them there "
            f"({install_command(extra)}), or choose an interpreter or an image that has them "
            f"(cluster.python=..., container=...){way_out}",
            found_by="node",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package around it.
        return False
