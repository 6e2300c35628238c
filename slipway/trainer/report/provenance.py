"""The commit that the trainer's code came from, if it is known, and the packages it ran with."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
FILE_NAME = "git-info.log"
# The launcher writes it next to code/, the copy of the trainer that a launch runs.
_MANIFEST = "launcher.json"
_PATIENCE = 30.0
PACKAGES_NAME = "packages.json"
# What decides how a training goes; those that are not installed are left out.
_PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "apex", "numpy", "tokenizers")


def write_git_info(log_dir: Path, code: Path = CODE) -> None:
    """Write the commit of the trainer's code, and how it differed from it; nothing where that is unknown."""
    text = _read_checkout(code) or _read_launch(code)
    if text:
        (log_dir / FILE_NAME).write_text(text, encoding="utf-8")


def write_packages(log_dir: Path) -> None:
    """Write the versions of this process's packages, as one object."""
    (log_dir / PACKAGES_NAME).write_text(json.dumps(packages(), indent=2) + "\n", encoding="utf-8")


def packages(*others: str) -> dict[str, str]:
    """Return the versions of this process's packages, and of `others` that are installed."""
    # Imported late: callers report a missing torch first.
    import torch

    # Unlike the metadata of a wheel from PyPI, torch itself names its build: 2.13.0+cu130.
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in (*_PACKAGES, *others):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


def overridden_keys(directory: Path) -> set[str]:
    """Return the keys of a training that the command line of its launch set; `directory` is the launch's."""
    try:
        overrides = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))["overrides"]
        return {word.lstrip("+").partition("=")[0].removeprefix("training.") for word in overrides}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _read_checkout(code: Path) -> str | None:
    # A copy may lie in a checkout, in its results/, without being a part of it.
    if not _git(code, "ls-files", "--", "."):
        return None
    commit, changes = _git(code, "rev-parse", "HEAD"), _git(code, "diff", "HEAD", "--", ".")
    return f"commit hash: {commit}\n{changes or ''}" if commit else None


def _read_launch(code: Path) -> str | None:
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
