"""The reason why an input file is missing."""

from __future__ import annotations

import stat
from pathlib import Path

_MISSING = "there is no such file"


def explain_missing(path: Path) -> str | None:
    """Return why there is no file at `path` for this user; None if there is one.

    Unlike `Path.is_file`, it reports a parent without search permission, and a name that is too long.
    """
    try:
        return None if stat.S_ISREG(path.stat().st_mode) else _MISSING
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a null character is a ValueError
        return _MISSING
    except OSError as error:
        return error.strerror
