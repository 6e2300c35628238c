"""Root file systems that start as their image says: what `enroot import` writes into one, without Enroot.

Enroot reads the environment from ``/etc/environment``, and starts the container with ``/etc/rc``, which goes
to the working directory and runs the entry point; ``/etc/fstab`` has the volumes (Enroot,
doc/image-format.md and doc/standard-hooks.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
from pathlib import Path, PurePosixPath

from launcher.errors import UserError, escape
from launcher.images.store import ImageConfig

_MOST_LINKS = 40
_PLAIN_PATH = re.compile(r"/[^\s\\$#]*")
_RC_LOCAL = (
    "# /etc/rc reads this before it starts the program: a place for changes of the site's or the user's.\n"
)
_RC = """\
# enroot-provenance: {source}
{labels}
mkdir -p {workdir} 2> /dev/null
cd {workdir} && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    {entrypoint} "$@"
else
    {command}
fi
"""


def configure(root: Path, config: ImageConfig, source: str) -> list[str]:
    """Write the environment, the working directory, the entry point and the volumes into a root file system.

    Names in the unpacked image are never followed out of it; `source` is recorded as its origin. Return what
    was left out, in words.
    """
    environment = [word for word in config.env if "\n" not in word]
    # Those that a line of an fstab takes as they are, and that lead nowhere else on the node.
    plain = (path for path in config.volumes if _PLAIN_PATH.fullmatch(path))
    volumes = [path for path in plain if ".." not in path.split("/")]
    etc = resolve_inside(root, "/etc")
    for directory in (etc, resolve_inside(root, config.workdir or "/")):
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            directory.mkdir(parents=True)
    entrypoint = ["exec", *map(shlex.quote, config.entrypoint)]
    command = [shlex.quote(word) for word in config.cmd]
    if not config.entrypoint and not command:
        command = ["/bin/sh"]
    rc = _RC.format(
        source=escape(source),
        labels="".join(f"# {escape(name)} {escape(value)}\n" for name, value in config.labels.items()),
        workdir=shlex.quote(config.workdir or "/"),
        entrypoint=" ".join(entrypoint),
        command=" ".join([*entrypoint, *command]),
    )
    mount = "none x-create=dir,bind,rw,nosuid,nodev"
    for name, text in (
        ("environment", "".join(f"{word}\n" for word in environment)),
        ("fstab", "".join(f"${{ENROOT_ROOTFS}}{path} {path} {mount}\n" for path in volumes)),
        ("rc", rc),
        ("rc.local", _RC_LOCAL),
    ):
        _write(etc / name, text)
    broken = [word.partition("=")[0] for word in config.env if word not in environment]
    odd = [path for path in config.volumes if path not in volumes]
    notes = [f"the variable {escape(name)} has a line break in it: left out" for name in broken]
    return notes + [f"the volume {escape(path)} is no plain path: left out" for path in odd]


def _write(path: Path, text: str) -> None:
    """Write a file in place of any entry of its name, even a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o644)


def resolve_inside(root: Path, name: str) -> Path:
    """Return the path of a name in a root file system, following links as if the root were ``/``."""
    place = PurePosixPath("/")
    rest = list(PurePosixPath("/", name).parts[1:])
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            place = place.parent
            continue
        path = root.joinpath(*place.parts[1:], part)
        if not path.is_symlink():
            place /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise UserError(f"the image's {escape(name)} is a link that goes in circles")
        target = PurePosixPath(path.readlink())
        if target.is_absolute():
            place = PurePosixPath("/")
        rest = [part for part in target.parts if part != "/"] + rest
    return root.joinpath(*place.parts[1:])


def make_readable(root: Path) -> int:
    """Let the owner read all of a root file system, and empty ``/dev``; return its bytes.

    Containers bring their own ``/dev``. Some distributions give files no permissions at all, since root
    needs none; images are packed and run by other users.
    """
    dev = resolve_inside(root, "/dev")
    if dev.is_dir():
        _grant(dev, dev.stat().st_mode, stat.S_IRWXU)
        for path in dev.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return _make_tree_readable(root)


def _make_tree_readable(directory: Path) -> int:
    _grant(directory, directory.stat().st_mode, stat.S_IRWXU)
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _make_tree_readable(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                total += status.st_size
                _grant(Path(entry.path), status.st_mode, stat.S_IRUSR)
    return total


def _grant(path: Path, mode: int, required: int) -> None:
    if mode & required != required:
        path.chmod(stat.S_IMODE(mode) | required)
