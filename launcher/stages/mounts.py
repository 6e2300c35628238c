"""Mounts of a container: the user's own texts and our directories, in Pyxis' form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.errors import UserError, did_you_mean, shown
from launcher.plan import SOURCES_WITHOUT_PATH, Mount

KEY = "container_mounts"

# What Enroot knows (mount_opts of its enroot-mount.c); of another word it says nothing, and ignores it.
_FLAGS = re.compile(
    r"async|atime|bind|dev|diratime|dirsync|exec|iversion|loud|mand|noatime|nodev|nodiratime|noexec"
    r"|noiversion|nomand|norelatime|nostrictatime|nosuid|private|rbind|relatime|remount|ro|rprivate|rshared"
    r"|rslave|runbindable|rw|shared|silent|slave|strictatime|suid|sync|unbindable|lazytime|nolazytime|auto"
    r"|defaults|group|noauto|nofail|nogroup|noowner|nouser|nousers|owner|user|users|x-create=dir"
    r"|x-create=file|x-create=auto|x-move|x-detach"
)
# Those of tmpfs(5) have values, which the kernel checks.
_TMPFS_FLAG = re.compile(r"(?:size|nr_blocks|nr_inodes|mode|uid|gid|huge|mpol)=[\w.%:=,-]+")
_HOME = re.compile(r"(?:~|\$HOME|\$\{HOME\})(?=/|$)")
_VALID = "valid: source, source:target or source:target:flags, tmpfs:target, umount:target"
# Enroot reads mounts as words of a double-quoted string of bash, on each node.
_EVALUATED = re.compile(r'[$`"\\\n]')


def mounts_of(
    writable: Mapping[Path, str], readable: Mapping[Path, str], texts: Iterable[str]
) -> tuple[Mount, ...]:
    """Return the mounts of a job's directories, and the user's own after them.

    A read-only directory below or equal to a writable one is not mounted again: it would cover that.

    Parameters
    ----------
    writable, readable
        What the job needs, each with the key that it comes from.
    texts
        The values of `container_mounts`.

    Raises
    ------
    UserError
        If one is not a mount that Pyxis can take.
    """
    ours = [_of_path(path, writable[path]) for path in _outermost(writable)]
    ours += [_of_path(path, key, "ro") for path, key in readable.items() if not _within(path, writable)]
    theirs = [_parse(text) for text in texts]
    for mount in theirs:
        _check_cover(mount, writable)
    return (*ours, *theirs)


def _check_cover(mount: Mount, writable: Mapping[Path, str]) -> None:
    """Refuse a read-only mount over a directory that the job writes to."""
    covered = next((path for path in writable if path.is_relative_to(mount.target)), None)
    if covered is None or "ro" not in (mount.flags or "").split("+"):
        return
    raise UserError(
        f"{KEY}: {mount.target} is mounted read-only over {covered}, where the job writes",
        key=KEY,
        also=(writable[covered],),
        hint="without :ro, or to another target",
    )


def _within(path: Path, others: Mapping[Path, str]) -> bool:
    return any(path.is_relative_to(other) for other in others)


def _outermost(paths: Mapping[Path, str]) -> list[Path]:
    def is_inner(path: Path) -> bool:
        return any(path != other and path.is_relative_to(other) for other in paths)

    return [path for path in paths if not is_inner(path)]


def _of_path(path: Path, key: str, flags: str | None = None) -> Mount:
    if re.search("[,:]", str(path)):
        raise UserError(
            f"{key}: {shown(str(path))} cannot be mounted in a container: Pyxis separates with , and :",
            key=key,
            hint="rename the directory, or choose one without them",
        )
    _check_words(str(path), str(path), key)
    return Mount(str(path), str(path), flags)


def _parse(text: str) -> Mount:
    parts = text.split(":", 2)
    if "," in text or not all(parts):
        raise _no_mount(text, _VALID)
    flags = parts[2] if len(parts) > 2 else None
    if parts[0] in SOURCES_WITHOUT_PATH:
        if len(parts) == 1:
            raise _no_mount(text, f"{text}:/its/target, or ./{text} for a directory of that name")
        source = parts[0]
    else:
        source = _whole(parts[0], text)
    target = _target(parts[1], text) if len(parts) > 1 else source
    for flag in flags.split("+") if flags is not None else ():
        _check_flag(flag, text, source)
    return Mount(source, target, flags)


def _whole(path: str, text: str) -> str:
    """Return a path of the host as a whole one: jobs start elsewhere than the user stands."""
    path = _HOME.sub(lambda _: str(Path.home()), path, count=1)
    _check_words(path, text, KEY)
    if path.startswith("~"):
        raise _no_mount(text, "another user's home by its whole path")
    return path if path.startswith("/") else str(Path(path).absolute())


def _target(path: str, text: str) -> str:
    path = _HOME.sub(lambda _: str(Path.home()), path, count=1)
    _check_words(path, text, KEY)
    if not path.startswith("/"):
        raise _no_mount(text, "the target in the container is a whole path")
    return path


def _check_words(path: str, text: str, key: str) -> None:
    found = _EVALUATED.search(path)
    if found is None:
        return
    hint = 'rename it, or choose a path without $, `, ", \\ and line breaks'
    if found[0] == "$" and key == KEY:
        hint = "only $HOME is known here; of another variable: ${oc.env:NAME}"
    raise UserError(
        f"{key}: {shown(text)} cannot be mounted: Enroot would evaluate its {shown(found[0])} on the nodes",
        key=key,
        hint=hint,
    )


def _check_flag(flag: str, text: str, source: str) -> None:
    if _FLAGS.fullmatch(flag) or (source == "tmpfs" and _TMPFS_FLAG.fullmatch(flag)):
        return
    raise UserError(
        f"{KEY}: {shown(text)}: Enroot knows no flag {shown(flag)}, and would ignore it",
        key=KEY,
        hint=f"{did_you_mean(flag, _FLAGS.pattern.split('|'))}; several are joined by +: ro+rprivate",
    )


def _no_mount(text: str, hint: str) -> UserError:
    return UserError(f"{KEY}: {shown(text)} is not a mount", key=KEY, hint=hint)
