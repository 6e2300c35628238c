"""A throw-away multi-node Slurm on loopback: for first steps, for tests and for judging scripts.

Importing this package costs nothing: configurations ask it for a path on every launch. What boots and stops
daemons is loaded when it is first named.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.sandbox.lifecycle import Sandbox, down, up
    from launcher.sandbox.options import SandboxOptions
    from launcher.sandbox.state import SandboxNode, SandboxStatus, status

__all__ = [
    "DIRECTORY_VARIABLE",
    "STATE_FILE",
    "Sandbox",
    "SandboxNode",
    "SandboxOptions",
    "SandboxStatus",
    "default_directory",
    "down",
    "is_sandbox",
    "slurm_conf_path",
    "status",
    "up",
]

DIRECTORY_VARIABLE = "SLIPWAY_SANDBOX_DIR"
STATE_FILE = "sandbox.json"

_LAZY = {
    "SandboxNode": "state",
    "SandboxOptions": "options",
    "Sandbox": "lifecycle",
    "SandboxStatus": "state",
    "down": "lifecycle",
    "status": "state",
    "up": "lifecycle",
}


def default_directory() -> Path:
    """Return ``$SLIPWAY_SANDBOX_DIR``, or ``/var/lib/slipway/sandbox`` if it is not set."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or "/var/lib/slipway/sandbox")


def is_sandbox(directory: Path) -> bool:
    """Return True if `up` created a sandbox in this directory; it may be down by now."""
    return (directory / STATE_FILE).is_file()


def slurm_conf_path(directory: Path) -> Path:
    """Return the path of the slurm.conf of a sandbox in `directory`, whether or not it is up."""
    return directory / "etc" / "slurm.conf"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
