"""Collect text files: which ones, in which order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError


@dataclass(frozen=True)
class TextFile:
    """A file and its size in bytes when it was found."""

    path: Path
    size: int


def collect(
    inputs: Sequence[Path], pattern: str, seed: int, max_files: int | None, max_bytes: int | None
) -> list[TextFile]:
    """Find the files to tokenize, in their final order.

    Parameters
    ----------
    inputs
        Files, taken as they are, and directories, searched recursively for `pattern`.
    pattern
        A glob for file names.
    seed
        Sorted files are shuffled with it, so that the last documents, which are held out, are as the others.
    max_files, max_bytes
        Take no more than these of the shuffled list.

    Raises
    ------
    UserError
        If an input does not exist, or no file matches.
    """
    paths = sorted({path for item in inputs for path in _matches(item, pattern)})
    if not paths:
        where = ", ".join(str(item) for item in inputs)
        raise UserError(f"--input {where}: no file matches --pattern {pattern!r}")
    random.Random(seed).shuffle(paths)
    return _limited((TextFile(path, path.stat().st_size) for path in paths), max_files, max_bytes)


def fingerprint(files: Sequence[TextFile], workers: int = 1) -> str:
    """Return a SHA-256 over the files' order, paths and contents; sizes alone would miss an edit."""
    digest = hashlib.sha256()
    # Threads: hashing and reading both leave Python's lock to others.
    with ThreadPoolExecutor(workers) as pool:
        for file, content in zip(files, pool.map(_content, files), strict=True):
            digest.update(f"{file.path}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def read_text(path: Path) -> str | None:
    """Return a file's text, or None if it is not UTF-8 or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def _content(file: TextFile) -> str:
    """Return the SHA-256 of a file, or its size where it cannot be read: such a file is left out."""
    try:
        with file.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return str(file.size)


def _matches(item: Path, pattern: str) -> Iterable[Path]:
    if item.is_dir():
        # From Python 3.13 on, the library takes such a `**` for a `*`.
        if any("**" in part and part != "**" for part in Path(pattern).parts):
            raise UserError(f"--pattern {pattern!r}: expected a glob for file names: `**` stands alone")
        try:
            return [path.resolve() for path in item.rglob(pattern) if path.is_file()]
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"--pattern {pattern!r}: expected a glob for file names: {error}") from None
    if item.is_file():
        return (item.resolve(),)
    raise UserError(f"--input {item}: there is no such file or directory")


def _limited(files: Iterable[TextFile], max_files: int | None, max_bytes: int | None) -> list[TextFile]:
    taken: list[TextFile] = []
    total = 0
    for file in files:
        total += file.size
        if (max_files is not None and len(taken) >= max_files) or (
            max_bytes is not None and total > max_bytes and taken
        ):
            break
        taken.append(file)
    return taken
