"""Trust in files of runs: the paths in them are used only if no other user could have written them.

Anybody may have written a manifest, and Slurm's commands load plugins from the directory that their
configuration names. A manifest's configuration is therefore used only if no user but the caller, root and
Slurm's own user could have written the manifest or the configuration, or can replace either. The same holds
for all of a run that names programs, libraries or clusters, or is one.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import logging
import os
import pwd
import re
import stat
from pathlib import Path

from launcher.errors import escape
from slipway.common.files import read_text

logger = logging.getLogger("launcher.runs")

_SITE_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf")
_SLURM_USER = re.compile(r"^\s*SlurmUser\s*=\s*([^\s#(]+)", re.IGNORECASE | re.MULTILINE)
_MOST_LINKS = 40  # in one path, as in the kernel
_ACCESS_LIST = "system.posix_acl_access"
# The configurations that were logged: hundreds of runs may name the same.
_logged: set[str] = set()


def usable_slurm_conf(manifest: Path, slurm_conf: str | None) -> str | None:
    """Return the configuration of Slurm that a manifest names; ``None``, and warn once, without trust."""
    if slurm_conf is None or slurm_conf == os.environ.get("SLURM_CONF"):
        return slurm_conf
    why = why_untrusted(manifest) or why_untrusted(Path(slurm_conf), may_be_missing=True)
    if why is None:
        return slurm_conf
    if slurm_conf not in _logged:
        _logged.add(slurm_conf)
        logger.warning(
            "%s names the cluster of SLURM_CONF=%s, which is not trusted (%s): this machine's own is asked",
            *map(escape, (str(manifest), slurm_conf, why)),
        )
    return None


def is_own(path: Path) -> bool:
    """Return True if the caller owns a file."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def why_untrusted(path: Path, *, may_be_missing: bool = False) -> str | None:
    """Return who else could have written or could replace a file, else ``None``.

    Every directory and every link on the way to the file is checked. In a directory with the sticky bit, such
    as ``/tmp``, others can create files, but not replace those of somebody else.
    """
    if not path.is_absolute() or "\0" in str(path):
        return f"{path} is no absolute path"
    at, left, links = "/", list(reversed(path.parts[1:])), 0
    try:
        while left:
            name = left.pop()
            if name == "..":
                at = os.path.dirname(at)  # noqa: PTH120  # `at` is without links
                continue
            entry = os.path.join(at, name)  # noqa: PTH118
            try:
                status = os.lstat(entry)
            except FileNotFoundError:
                if not may_be_missing:
                    raise
                # That of a Slurm that was taken down, say: others must not be able to create it.
                return f"everybody may write {at}" if os.lstat(at).st_mode & stat.S_IWOTH else None
            if why := _why_open(entry, status):
                return why
            if not stat.S_ISLNK(status.st_mode):
                at = entry
                continue
            links += 1
            if links > _MOST_LINKS:
                return f"{path} leads through too many links"
            target = Path(entry).readlink()
            names = target.parts
            if target.is_absolute():
                at, names = "/", names[1:]
            left += reversed(names)
    except OSError as error:
        return f"{path}: {(error.strerror or str(error)).lower()}"
    return None


def _why_open(path: str, status: os.stat_result) -> str | None:
    if status.st_uid not in frozenset({0, os.geteuid(), *_slurm_users(os.environ.get("SLURM_CONF"))}):
        return f"{path} belongs to {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write {path}"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(path, status.st_gid):
        return f"a group may write {path}"
    return None


def _is_own_group(path: str, group: int) -> bool:
    """Return True if a group is the caller's private one, and no access list lets others in with it."""
    try:
        me, named = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if group != me.pw_gid or named.gr_name != me.pw_name or set(named.gr_mem) - {me.pw_name}:
        return False
    try:
        return _ACCESS_LIST not in os.listxattr(path)
    except OSError:
        return True  # a file system without access lists


@functools.cache
def _slurm_users(slurm_conf: str | None) -> frozenset[int]:
    """Return the user that the caller's Slurm runs as; ``slurm`` if its configuration does not name it."""
    names: list[str] = []
    for path in (slurm_conf, *_SITE_CONFIGURATIONS):
        if path and not names:
            with contextlib.suppress(OSError):
                names = _SLURM_USER.findall(read_text(Path(path), errors="replace"))
    users = set()
    for name in names or ["slurm"]:
        with contextlib.suppress(KeyError):
            users.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
    return frozenset(users)


def user_name(user: int) -> str:
    """Return the name of a user's number, if it has one."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
