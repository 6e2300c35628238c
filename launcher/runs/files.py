"""Writing that cannot be seen half done: temporary name, fsync, rename."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that a reader, or a crash, meets either the old content or the new.

    The user's umask decides, as ever, what of `mode` is given. A path in the text that is not UTF-8 is
    written as the bytes that it is.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode & ~umask())
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def umask() -> int:
    """The permissions that the user gives to nobody; asking for them needs setting them."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def link_or_copy(link: Path, target: Path) -> None:
    """Link to a file from a folder that is made if needed; copy the file where there can be no links.

    A link that exists already is left alone.
    """
    link.parent.mkdir(exist_ok=True)
    try:
        link.symlink_to(os.path.relpath(target, link.parent))
    except FileExistsError:
        return
    except OSError:
        write_atomic(link, target.read_text(encoding="utf-8", errors="surrogateescape"))


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
    """Copy the files of a Python package, and make the copy durable.

    Bytecode is left out, and hidden files: an editor's, which may be links to nowhere.
    """
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if entry.name == "__pycache__" or entry.name.startswith("."):
            continue
        if entry.is_dir():
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
