"""Links and copies in run directories, made so that they cannot be seen half done."""

from __future__ import annotations

import os
from pathlib import Path

from supervisor.files import sync_directory, write_atomic


def umask() -> int:
    """Return the permissions that the user gives to nobody; asking for them needs setting them."""
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
