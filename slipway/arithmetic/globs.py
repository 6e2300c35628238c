"""Globs that are taken literally if a file has that name: `a[1].jsonl` may be a file."""

from __future__ import annotations

import glob
import os
from pathlib import Path, PurePath


def split_glob(path: str) -> tuple[str, str]:
    """Return the part of a path before its first wildcard, and the glob below it; empty without one."""
    parts = PurePath(path).parts
    for number, part in enumerate(parts):
        if glob.has_magic(part) and not os.path.lexists(Path(*parts[: number + 1])):
            return str(Path(*parts[:number])), str(Path(*parts[number:]))
    return path, ""
