"""The errors that a user can fix: no traceback, exit code 2; and the exit codes of the verbs about jobs.

For several jobs the worst code counts: 1 before 3, 75, 4 and 0.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.secrecy import MASK, hidden, is_secret_name, without_secrets
from slipway.common.errors import UserError as UserError
from slipway.common.errors import escape as escape
from slipway.common.errors import nearest as nearest
from slipway.common.node.settings import EXIT_INTERRUPTED

_LONGEST = 160


class Mistakes(UserError):
    """Several mistakes, each with its own key and source."""

    def __init__(self, mistakes: Sequence[UserError]) -> None:
        super().__init__("\n".join(mistake.message for mistake in mistakes))
        self._mistakes = tuple(mistakes)

    @property
    def mistakes(self) -> tuple[UserError, ...]:
        return self._mistakes

    def __str__(self) -> str:
        return "\n".join(str(mistake) for mistake in self._mistakes)


def did_you_mean(name: str, valid: Iterable[str], most: float = math.inf) -> str | None:
    """Return a hint with the nearest valid spelling, or else with all names, or a few if over `most`."""
    options = sorted(valid)
    close = nearest(name, options)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(options) > most:
        few = difflib.get_close_matches(name, options, cutoff=0)
        return f"nearest of {len(options)}: {', '.join(few)}"
    return f"valid: {', '.join(options)}" if options else None


def nearest_files(path: Path, suffixes: str | tuple[str, ...] = "", most: int = 3) -> str:
    """Return a hint with the nearest names in a path's directory, or else with any of them."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name.endswith(suffixes))
    except FileNotFoundError:
        return f"there is no {path.parent}"
    except OSError:  # a directory that may be searched, and not listed
        names = []
    listed = nearest(path.name, names, most) or names[:most]
    return f"in {path.parent}: {', '.join(listed)}" if listed else f"{path.parent} has no such files"


def setting_error(message: str, hint: str | None = None, also: Sequence[str] = ()) -> UserError:
    """Return the mistake ``KEY=VALUE: PROBLEM``, or ``KEY: PROBLEM``, as one of that key."""
    return UserError(message, key=message.partition(":")[0].partition("=")[0], also=also, hint=hint)


def literal(value: Any) -> str:
    """Return a value as the user would write it, in one line and with secrets masked."""
    return shortened(_literal(value))


def setting(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` of the configuration, with secrets masked."""
    value = hidden(key, value)
    return f"{escape(key)}={value if value == MASK else literal(value)}"


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def end_of(text: str) -> str:
    """Shorten a program's message at its start: programs end with the problem."""
    return text if len(text) <= _LONGEST else f"... {text[4 - _LONGEST :]}"


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_literal_at(str(key), item)}' for key, item in value.items())}}}"
    return repr(without_secrets(value) if isinstance(value, str) else value)


def _literal_at(key: str, value: Any) -> str:
    return MASK if value is not None and is_secret_name(key) else _literal(value)


# The remedies by the system's reason to refuse a write.
_REMEDIES = {
    errno.EACCES: "choose another place, {key}=..., or ask the owner for permission",
    errno.EPERM: "choose another place, {key}=..., or ask the owner for permission",
    errno.EROFS: "it is mounted read-only here: choose another place, {key}=...",
    errno.ENOSPC: "make room (`df -h {there}`, `df -i {there}`), or choose another place, {key}=...",
    errno.EDQUOT: "your quota is used up: remove what you no longer need, or choose another place, {key}=...",
    errno.ENOTDIR: "a part of this path is a file, not a directory: choose another place, {key}=...",
    errno.EEXIST: "a file of that name is in the way: move it, or choose another place, {key}=...",
    errno.ENAMETOOLONG: "a name in it is too long for this file system: choose a shorter one, {key}=...",
    errno.ELOOP: "its symbolic links form a loop: choose another place, {key}=...",
}


def explain_os_error(error: OSError, path: Path, key: str, *, verb: str = "write") -> UserError:
    """Return the user's error for the system's refusal of a path.

    The remedy names the nearest directory above it that exists.
    """
    remedy = _REMEDIES.get(error.errno or 0, "choose another place, {key}=...")
    reason = (error.strerror or str(error)).lower()
    return UserError(
        f"cannot {verb} {shortened(escape(str(path)))}: {reason}",
        key=key,
        hint=remedy.format(key=key, there=next(filter(os.path.isdir, (path, *path.parents)), path)),
    )


# The system's refusals that a user can resolve; others are bugs.
_REFUSALS = {
    errno.EACCES: "ask the owner for permission, or use another path",
    errno.EPERM: "ask the owner for permission, or use another path",
    errno.EROFS: "it is mounted read-only here",
    errno.ENOSPC: "make room there, or write elsewhere",
    errno.EDQUOT: "your quota is used up: remove what you no longer need",
    errno.ENAMETOOLONG: "no file can have such a name",
    errno.ELOOP: "its symbolic links form a loop",
    errno.ENOTDIR: "a part of this path is a file, not a directory",
}


def explain_refusal(error: OSError) -> UserError | None:
    """Return the user's error for a refused path or output; ``None`` for any other error."""
    hint = _REFUSALS.get(error.errno or 0)
    if hint is None:
        return None
    what = shortened(escape(str(error.filename))) if error.filename is not None else "the output"
    return UserError(f"{what}: {(error.strerror or str(error)).lower()}", hint=hint)


def absolute_path(path: str | Path, key: str | None = None) -> Path:
    """Return a path from the root on, with `~` expanded; `key` is the configuration's, for the message."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        value = f"{key}={literal(str(path))}" if key else escape(str(path))
        raise UserError(f"{value}: there is no such user's home", key=key) from error


def check_directory(option: str, path: Path) -> None:
    """Raise UserError for a directory that does not exist or cannot be read: it must not be skipped."""
    if not stat.S_ISDIR(file_mode(path)):
        raise UserError(f"{option} {escape(str(path))}: no such directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{option} {escape(str(path))}: permission denied", hint=_REFUSALS[errno.EACCES])


# The errors which mean that there is no file; with any other error there may be one.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF)


def file_mode(path: Path) -> int:
    """Return the mode of the file at `path`, for the functions of `stat`; 0 if there is no file.

    Raise OSError if that is unknown, for example because a directory above may not be searched. From Python
    3.14 on, `Path.exists`, `is_file` and `is_dir` answer False for such a file.
    """
    try:
        return path.stat().st_mode
    except ValueError:  # a null character
        return 0
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return 0
        raise


# --- exit codes of the verbs about jobs

DONE = 0
WENT_WRONG = 1
MISTAKE = 2  # in the command line or the configuration
NOT_KNOWN = 3
UNDER_WAY = 4
INTERRUPTED = EXIT_INTERRUPTED  # the trainer's own: saved before its end, launch again to continue
WATCHING_ENDED = 130  # Ctrl-C

_WORST_FIRST = (WENT_WRONG, NOT_KNOWN, MISTAKE, INTERRUPTED, UNDER_WAY, DONE)


def worst_code(codes: Iterable[int]) -> int:
    """Return the worst exit code of several jobs; 0 for none."""
    present = set(codes)
    return next((code for code in _WORST_FIRST if code in present), DONE)
