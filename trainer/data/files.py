"""Whether a file is there."""

from __future__ import annotations

from pathlib import Path


def why_missing(path: Path) -> str | None:
    """Return why there is no file at `path` for this user; None if there is one.

    `Path.is_file` raises where a directory on the way may not be searched, or a name is too long.
    """
    try:
        return None if path.is_file() else "there is no such file"
    except OSError as error:
        return error.strerror
