"""A root file system that starts as its image says: what `enroot import` writes into it, written by us.

Enroot reads the environment from ``/etc/environment``, and starts the container with ``/etc/rc``, which goes
to the working directory and runs the entry point; ``/etc/fstab`` has the volumes (Enroot, doc/image-format.md
and doc/standard-hooks.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
from pathlib import Path, PurePosixPath

from launcher.errors import UserError, one_line
from launcher.images.store import ImageConfig

_MOST_LINKS = 40
_PLAIN = re.compile(r"/[^\s\\$#]*")
_RC_LOCAL = (
    "# /etc/rc reads this before it starts the program: a place for changes of the site's or the user's.\n"
)


def configure(root: Path, config: ImageConfig, source: str) -> tuple[str, ...]:
    """Write the environment, the working directory, the entry point and the volumes into a root file system.

    Parameters
    ----------
    root
        What an image was unpacked to; names in it are never followed out of it.
    source
        The reference that is written down as where it is from.

    Returns
    -------
    tuple of str
        What could not be kept, in words.
    """
    notes = [
        f"the variable {one_line(word.partition('=')[0])} has a line break in it: left out"
        for word in config.env
        if "\n" in word
    ]
    environment = [word for word in config.env if "\n" not in word]
    etc = inside(root, "/etc")
    _make_directory(etc)
    _make_directory(inside(root, config.workdir or "/"))
    for name, text in (
        ("environment", "".join(f"{word}\n" for word in environment)),
        ("fstab", "".join(_volume(path) for path in config.volumes if _is_plain(path))),
        ("rc", _rc(config, source)),
        ("rc.local", _RC_LOCAL),
    ):
        _write(etc / name, text)
    notes += [
        f"the volume {one_line(path)} is no plain path: left out"
        for path in config.volumes
        if not _is_plain(path)
    ]
    return tuple(notes)


def _is_plain(path: str) -> bool:
    """Whether a line of an fstab takes it as it is, and it leads to nowhere else on the node."""
    return _PLAIN.fullmatch(path) is not None and ".." not in path.split("/")


def _volume(path: str) -> str:
    return f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n"


def _rc(config: ImageConfig, source: str) -> str:
    workdir = shlex.quote(config.workdir or "/")
    entry = [shlex.quote(word) for word in config.entrypoint]
    command = [shlex.quote(word) for word in config.cmd]
    if not entry and not command:
        command = ["/bin/sh"]
    labels = [f"# {one_line(name)} {one_line(value)}" for name, value in config.labels.items()]
    return "\n".join(
        [
            f"# enroot-provenance: {one_line(source)}",
            *labels,
            "",
            f"mkdir -p {workdir} 2> /dev/null",
            f"cd {workdir} && unset OLDPWD || exit 1",
            "",
            "if [ -s /etc/rc.local ]; then",
            "    . /etc/rc.local",
            "fi",
            "",
            "if [ $# -gt 0 ]; then",
            f'    {" ".join(["exec", *entry])} "$@"',
            "else",
            f"    {' '.join(['exec', *entry, *command])}",
            "fi",
            "",
        ]
    )


def _write(path: Path, text: str) -> None:
    """Write a file in place of whatever has its name, be it a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o644)


def _make_directory(path: Path) -> None:
    with contextlib.suppress(FileExistsError, NotADirectoryError):
        path.mkdir(parents=True)


def inside(root: Path, name: str) -> Path:
    """Where a name of a root file system is: its links are followed as if that were ``/``.

    Raises
    ------
    UserError
        If the links go in circles.
    """
    place = PurePosixPath("/")
    left = list(PurePosixPath("/", name).parts[1:])
    links = 0
    while left:
        part = left.pop(0)
        if part == "..":
            place = place.parent
            continue
        here = root.joinpath(*place.parts[1:], part)
        if not here.is_symlink():
            place /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise UserError(f"the image's {one_line(name)} is a link that goes in circles")
        to = PurePosixPath(here.readlink())
        if to.is_absolute():
            place = PurePosixPath("/")
        left = [part for part in to.parts if part != "/"] + left
    return root.joinpath(*place.parts[1:])


def make_readable(root: Path) -> int:
    """Let the owner read all of it, and empty ``/dev``, which containers have of their own; return its bytes.

    Some distributions give files no rights at all, since root needs none; who packs, or runs, an image is not
    root.
    """
    dev = inside(root, "/dev")
    if dev.is_dir():
        _grant(dev, dev.stat().st_mode, stat.S_IRWXU)
        for path in dev.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return _readable(root)


def _readable(directory: Path) -> int:
    _grant(directory, directory.stat().st_mode, stat.S_IRWXU)
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _readable(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                total += found.st_size
                _grant(Path(entry.path), found.st_mode, stat.S_IRUSR)
    return total


def _grant(path: Path, mode: int, wanted: int) -> None:
    if mode & wanted != wanted:
        path.chmod(stat.S_IMODE(mode) | wanted)
