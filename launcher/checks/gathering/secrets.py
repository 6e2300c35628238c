"""Files of secrets: who may read them, and whether they are there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from launcher.checks.facts import LostSecret
from launcher.drafting import Draft
from launcher.plan import Plan


def open_secrets(plan: Plan) -> dict[str, str]:
    """The files of secrets that others than the owner may read, as far as this machine has them."""
    found = {}
    for variable, path in plan.job.environment_files.items():
        try:
            mode = Path(path).stat().st_mode
        except OSError:
            continue
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            found[variable] = path
    return found


def lost_secrets(made: Draft) -> tuple[LostSecret, ...]:
    """The files of secrets that are not there, or that the user may not read."""
    config = made.composition.config
    lost = []
    for variable, path in made.plan.job.environment_files.items():
        why = _why_lost(path)
        if why is not None:
            key = f"env_files.{variable}" if variable in config.env_files else "wandb_api_key_file"
            lost.append(LostSecret(key, path, why, certain=_is_directory(Path(path).parent)))
    return tuple(lost)


def _why_lost(path: str) -> str | None:
    """Why a file cannot be read, if it cannot."""
    try:
        mode = Path(path).stat().st_mode
    except PermissionError:
        return "its directory may not be entered"
    except OSError:
        return "there is no such file"
    if stat.S_ISDIR(mode):
        return "a directory, not a file"
    if not stat.S_ISREG(mode):
        return "a FIFO or a device, not a file: the job would wait for it"
    return None if os.access(path, os.R_OK) else "you may not read this file"


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
