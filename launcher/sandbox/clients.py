"""Slurm's commands, pointed at the sandbox and at nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launcher.sandbox.prerequisites import program

# A user's own defaults (SQUEUE_FORMAT, SBATCH_PARTITION, ...) or the job that this runs in would change
# what the commands do.
_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SACCT", "SCANCEL", "SCONTROL", "PMI")


def client_environment(slurm_conf: Path) -> dict[str, str]:
    """Return this process' environment without any Slurm but the sandbox's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {"SLURM_CONF": str(slurm_conf)}


def ask(slurm_conf: Path, *command: str, seconds: float = 5) -> list[str] | None:
    """Run a command of Slurm and return its lines; `None` when it failed or had no answer in time."""
    try:
        outcome = subprocess.run(
            [program(command[0]), *command[1:]],
            env=client_environment(slurm_conf),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None
    return outcome.stdout.splitlines() if outcome.returncode == 0 else None
