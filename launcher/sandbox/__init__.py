"""A throw-away multi-node Slurm on loopback: for first steps, for tests and for judging scripts.

Importing this package costs nothing: configurations ask it for a path on every launch.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY_VARIABLE = "SLIPWAY_SANDBOX_DIR"
STATE_FILE = "sandbox.json"


def default_directory() -> Path:
    """Return ``$SLIPWAY_SANDBOX_DIR``, or ``/var/lib/slipway/sandbox`` if it is not set."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or "/var/lib/slipway/sandbox")


def is_sandbox(directory: Path) -> bool:
    """Return True if `up` created a sandbox in this directory; it may be down by now."""
    return (directory / STATE_FILE).is_file()


def slurm_conf_path(directory: Path) -> Path:
    """Return the path of the slurm.conf of a sandbox in `directory`, whether or not it is up."""
    return directory / "etc" / "slurm.conf"


class Reporter:
    """A display of the steps of a start or a stop; this one shows nothing."""

    def step(self, what: str) -> None:
        """Show a step that begins and may take a moment."""

    def done(self, what: str) -> None:
        """Show a step that is complete."""
