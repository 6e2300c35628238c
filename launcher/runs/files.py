"""Writing that cannot be seen half done: temporary name, fsync, rename."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a crash, meets either the old content or the new."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def link_atomic(link: Path, target: Path) -> None:
    """Point a symbolic link at `target` (relative to the link's folder), replacing an older link.

    A regular file or directory of that name is left alone: it is not ours.
    """
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}.{os.urandom(4).hex()}")
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)


def copy_package(source: Path, target: Path) -> None:
    """Copy the files of a Python package, bytecode left out, and make the copy durable."""
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            if entry.name != "__pycache__":
                copy_package(entry, target / entry.name)
            continue
        with (target / entry.name).open("wb") as stream:
            stream.write(entry.read_bytes())
            stream.flush()
            os.fsync(stream.fileno())
    sync_directory(target)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
