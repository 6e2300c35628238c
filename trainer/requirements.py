"""The libraries that the interpreter must have, looked for before the first of them is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from trainer.errors import UserError

TRAINING = ("torch", "megatron.core", "numpy", "psutil", "yaml")
TOKENIZING = ("torch", "megatron.core", "numpy", "tokenizers")
TENSORBOARD = ("tensorboard",)
# What pip calls those that it does not call by the module's name.
_PACKAGES = {"megatron.core": "megatron-core", "yaml": "pyyaml"}


def check(modules: Sequence[str], way_out: str = "") -> None:
    """Look for modules without importing them.

    Parameters
    ----------
    modules
        Their names.
    way_out
        What would do without them, if anything.

    Raises
    ------
    UserError
        Naming those that are missing, and the interpreter.
    """
    missing = [_PACKAGES.get(module, module) for module in modules if not _is_there(module)]
    if missing:
        raise UserError(
            f"{sys.executable} lacks {', '.join(missing)}: install them there (pip install 'PATH[train]', "
            "where PATH is Slipway's checkout or wheel), or choose an interpreter or an image that has them "
            f"(cluster.python=..., container=...){way_out}",
            found_by="node",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package around it.
        return False
