"""The directory that a conversion writes: there whole, or not at all.

It is written as ``.unfinished-<name>-<unique>`` in the same directory, synced, and renamed.
``conversion.json`` in it records its source, so that the same conversion finds it, and another one leaves it
alone. A killed process leaves a hidden directory, which the next conversion to this name removes: a free lock
shows that no process writes it any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, escape
from slipway.common.files import sync_path, write_atomic
from slipway.trainer.checkpoint.store import UNFINISHED, make_suffix
from slipway.trainer.conversion.spec import Conversion
from slipway.trainer.conversion.tokenizer_files import tokenizer_digest

RECORD = "conversion.json"
_KEY = "conversion.output"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The directory cannot be written, or the disk is full: nothing that a traceback would explain.
_USER_ERRORS = (
    *(*_FULL, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG),
)
# How often a line is written where there is no terminal.
_PIPE_SECONDS = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def record_of(
    conversion: Conversion, step: int, source: Path, identity: str, **more: str | None
) -> dict[str, Any]:
    """Return the source and the options of a result; `identity` distinguishes the source from any other."""
    has_tokenizer, is_ours = conversion.to in ("huggingface", "slipway"), conversion.to == "slipway"
    return {
        "source": str(source),
        "step": step,
        "checkpoint": identity,
        "to": conversion.to,
        "dtype": conversion.dtype,
        "shard_bytes": None if is_ours else conversion.shard_bytes,
        "tokenizer": tokenizer_digest(conversion.tokenizer_dir) if has_tokenizer else None,
        **more,
    }


class AnotherResult(UserError):
    """The output is the result of a conversion of something else, or in another way."""


def is_there(output: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a directory is the result of this conversion, and whole.

    Raises
    ------
    UserError
        If something else has the name, or a file of the result is missing.
    """
    if not _is_whole(output, record):
        return False
    if _lock_of(output).exists():
        # That of a process which was killed after the rename.
        with contextlib.suppress(UserError, OSError), _lock_output(output):
            pass
    return True


def _is_whole(output: Path, record: Mapping[str, Any]) -> bool:
    """Return what :func:`is_there` does, and leave the lock as it is."""
    if not os.path.lexists(output) or _is_empty_directory(output):
        return False
    try:
        content = json.loads((output / RECORD).read_bytes())
        files, earlier = dict(content["files"]), dict(content["made_of"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{_KEY}={output}: it is there already, and is no result of a conversion ({RECORD}); "
            "expected a directory that is not there yet"
        ) from None
    differences = [
        f"{name}={earlier.get(name)}, now {value}"
        for name, value in json.loads(json.dumps(dict(record))).items()
        # The record of an earlier version does not have all.
        if name in earlier and earlier[name] != value and name != "source"
    ]
    if differences:
        raise AnotherResult(
            f"{_KEY}={output}: the result of another conversion is there ({'; '.join(differences)}); "
            f"choose another {_KEY}, or remove it"
        )
    for name, size in files.items():
        path = output / name
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(
                f"{_KEY}={output}: it is there already, but its {name} is missing or has another size; "
                "remove the directory to convert again"
            )
    return True


@contextlib.contextmanager
def create_directory(output: Path, record: Mapping[str, Any], size_bytes: int) -> Iterator[Path | None]:
    """Give a hidden directory to write into, which gets its name when the block ends, unless that fails.

    It is None if another process has finished the same conversion meanwhile.

    Parameters
    ----------
    size_bytes
        About the size of the output.

    Raises
    ------
    UserError
        If the directory cannot be written, there is too little space, another process writes it, or something
        else has the name. A file elsewhere that the block cannot read is named by its own path.
    """
    with _raise_user_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    if size_bytes > free:
        raise UserError(f"{_KEY}={output}: the result takes {size_bytes:,} bytes, and {free:,} are free")
    with contextlib.ExitStack() as lock:
        with _raise_user_errors(output):
            lock.enter_context(_lock_output(output))
            is_there_meanwhile = _is_whole(output, record)
        if is_there_meanwhile:
            yield None
            return
        unfinished = output.parent / f"{UNFINISHED}{output.name}-{make_suffix()}"
        with _raise_user_errors(output):
            for path in _leftovers(output):
                shutil.rmtree(path)
            unfinished.mkdir()
        try:
            with _raise_user_errors(output, written=unfinished):
                yield unfinished
            with _raise_user_errors(output):
                _finish(unfinished, output, record)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _finish(unfinished: Path, output: Path, record: Mapping[str, Any]) -> None:
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    content = {"version": 1, "made_of": dict(record), "files": sizes}
    write_atomic(unfinished / RECORD, json.dumps(content, indent=1) + "\n")
    for path in (*files, *(path for path in unfinished.rglob("*") if path.is_dir()), unfinished):
        sync_path(path)
    # An empty directory may be there, and is replaced; anything else makes this fail.
    unfinished.rename(output)
    sync_path(output.parent)


@contextlib.contextmanager
def _lock_output(output: Path) -> Iterator[None]:
    """Hold the lock of an output's name."""
    path = _lock_of(output)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise UserError(f"{_KEY}={output}: another process is writing it") from None
                raise
        # The last holder removes the file: it may have been gone before this process had the lock.
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock_of(output: Path) -> Path:
    return output.parent / f".{output.name}.lock"


def _leftovers(output: Path) -> list[Path]:
    pattern = re.compile(re.escape(f"{UNFINISHED}{output.name}-") + "[0-9a-f]{12}")
    return [path for path in output.parent.iterdir() if pattern.fullmatch(path.name)]


@contextlib.contextmanager
def _raise_user_errors(output: Path, written: Path | None = None) -> Iterator[None]:
    """Turn errors that the user can mend into messages; all are the output's, unless `written` limits it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _USER_ERRORS:
            raise
        culprit = f"{_KEY}={output}"
        if written is not None and error.errno not in _FULL:
            if not isinstance(error.filename, str | os.PathLike):
                raise
            if not Path(error.filename).is_relative_to(written):
                culprit = str(error.filename)
        where = "there" if culprit.startswith(_KEY) else f"to {output}"
        raise UserError(f"{culprit}: {error.strerror}; nothing was written {where}") from None


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


class Progress:
    """The bytes read or written so far: a bar on a terminal, in a pipe a line now and then."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._name, self._size = escape(name), max(1, size_bytes)
        self._done, self._shown = 0, -1
        self._is_terminal = sys.stdout.isatty()
        self._printed_at = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown >= 0:
            print(flush=True)

    def add(self, count: int) -> None:
        """Count further bytes, and show them if they are enough to be seen."""
        self._done += count
        percent = min(100, self._done * 100 // self._size)
        is_due = time.monotonic() - self._printed_at > _PIPE_SECONDS or percent == 100
        if percent == self._shown or not (self._is_terminal or is_due):
            return
        self._shown, self._printed_at = percent, time.monotonic()
        amount = f"{_megabytes(self._done)} of {_megabytes(self._size)} MB"
        if self._is_terminal:
            bar = "█" * (percent * 30 // 100)
            print(f"\r{self._name} {bar:░<30} {percent:3d} %, {amount}", end="", flush=True)
        else:
            print(f"{self._name} {percent} %, {amount}", flush=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count >= 10_000_000 else f"{count / 1e6:.1f}"
