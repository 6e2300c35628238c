"""``git-info.log``: from which commit the trainer's code came, as far as that can be told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[1]
FILE_NAME = "git-info.log"
# What the launcher writes beside code/, the copy of the trainer that a launch runs.
_MANIFEST = "launcher.json"
_PATIENCE = 30.0


def write_git_info(log_dir: Path, code: Path = CODE) -> None:
    """Write the commit of the trainer's code, and how it differed from it; nothing where that is unknown."""
    text = _of_checkout(code) or _of_launch(code)
    if text:
        (log_dir / FILE_NAME).write_text(text, encoding="utf-8")


def _of_checkout(code: Path) -> str | None:
    # A copy may lie in a checkout, in its results/, without being a part of it.
    if not _git(code, "ls-files", "--", "."):
        return None
    commit, changes = _git(code, "rev-parse", "HEAD"), _git(code, "diff", "HEAD", "--", ".")
    return f"commit hash: {commit}\n{changes or ''}" if commit else None


def _of_launch(code: Path) -> str | None:
    try:
        manifest: Any = json.loads((code.parents[1] / _MANIFEST).read_text(encoding="utf-8"))
        commit, changed = manifest.get("git_commit"), manifest.get("git_dirty")
    except (OSError, ValueError, AttributeError):
        return None
    if not commit:
        return None
    state = {
        True: "with changes that were not committed",
        False: "without changes",
        None: "changes not known",
    }
    return f"commit hash: {commit}\n{state[changed]}; the code as it ran: {code}\n"


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
