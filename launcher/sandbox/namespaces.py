"""The namespaces of a daemon: a host name, a mount table and name service files of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import configuration
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.paths import SandboxPaths

_ETC = Path("/etc")
_HOSTS, _NSSWITCH = _ETC / "hosts", _ETC / "nsswitch.conf"

# Mounts made on the machine later still arrive (slave), those made here never leave. The root of a chroot is
# often no mount point, and only mount points have a propagation: the directory is then mounted on one below
# /proc, which is always a mount point, and becomes the root from there.
_ISOLATE = """
if mount --make-rslave / 2>/dev/null; then exec "$@"; fi
set -e
mount --make-rslave /proc
mount --rbind / /proc/sys
mount --make-rslave /proc/sys
exec chroot /proc/sys "$@"
"""
_ENTER = """
set -e
hostname "$1"
shift
while [ "$1" != -- ]; do
    mount --bind "$1" "$2"
    shift 2
done
shift
cd /
exec "$@"
"""


def enter(host: str, mounts: Mapping[Path, Path], command: Sequence[str]) -> list[str]:
    """Return the command that runs another one in namespaces of its own.

    Parameters
    ----------
    host
        The host name that the command sees.
    mounts
        Files and directories, each with the path at which the command sees it.
    """
    pairs = [str(path) for pair in mounts.items() for path in pair]
    return [
        *("unshare", "--uts", "--mount", "--propagation", "unchanged"),
        *("sh", "-c", _ISOLATE, "isolate"),
        *("sh", "-c", _ENTER, "enter", host, *pairs, "--", *command),
    ]


def trial() -> list[str]:
    """Return a command that succeeds where a daemon can have namespaces of its own.

    slurmctld and slurmdbd drop their supplementary groups, and end where they may not.
    """
    return enter("n1", {_ETC: _ETC}, ["setpriv", "--clear-groups", "true"])


def write_name_files(options: SandboxOptions) -> None:
    """Write the hosts file and the nsswitch.conf of the daemons.

    They are mounted over the machine's. If the machine lacks one, a copy of /etc with both is mounted over
    /etc instead.

    Raises
    ------
    UserError
        When /etc cannot be copied.
    """
    paths = SandboxPaths(options.directory)
    paths.hosts.write_text(configuration.hosts(options, socket.gethostname(), _lines(_HOSTS)))
    paths.nsswitch.write_text(configuration.nsswitch(_lines(_NSSWITCH)))
    if _HOSTS.is_file() and _NSSWITCH.is_file():
        return
    # `cp`, for sockets and other special files; what is mounted below /etc is copied too.
    outcome = subprocess.run(
        ["cp", "--archive", str(_ETC), str(paths.private_etc)], capture_output=True, text=True
    )
    if outcome.returncode:
        raise UserError(f"cannot copy {_ETC}, which lacks a file: {outcome.stderr.strip()}")
    for source, machine in ((paths.hosts, _HOSTS), (paths.nsswitch, _NSSWITCH)):
        copy = paths.private_etc / machine.name
        # A dangling link would be written through.
        copy.unlink(missing_ok=True)
        copy.write_bytes(source.read_bytes())


def name_files(paths: SandboxPaths) -> dict[Path, Path]:
    """Return the files that `write_name_files` wrote, each with the path at which the daemons see it."""
    if paths.private_etc.is_dir():
        return {paths.private_etc: _ETC}
    return {paths.hosts: _HOSTS, paths.nsswitch: _NSSWITCH}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
