"""The requirements of a real multi-node Slurm, checked before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import namespaces

# No program, but a package of its own: slurmdbd cannot speak to a database without it.
_MYSQL_PLUGIN = "accounting_storage_mysql.so"
_DEBIAN_PLUGINS = "*/slurm-wlm"
# Programs and the Debian packages that have them. `slurm-wlm` stands for the controller, the node daemon
# and the clients together.
_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "squeue": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "srun": "slurm-wlm",
    "scancel": "slurm-wlm",
    "munged": "munge",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    _MYSQL_PLUGIN: "slurm-wlm-mysql-plugin",
    "sacct": "slurm-wlm",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
# The directories of daemons; `su` without a dash leaves a PATH without them.
_SYSTEM_FOLDERS = "/usr/sbin:/sbin"
_CAPABILITIES = (
    "a container needs the capabilities SYS_ADMIN and SETGID, and in a chroot SYS_CHROOT: docker run "
    "--cap-add SYS_ADMIN, where AppArmor is used also --security-opt apparmor=unconfined; or --privileged"
)
_LOCAL = "to train without Slurm and without root, use cluster=local"


def check(accounting: bool) -> None:
    """Check all requirements of a sandbox.

    Raises
    ------
    UserError
        If one is missing, with how to install it.
    """
    check_root()
    check_programs(accounting)
    check_namespaces()


def check_root() -> None:
    """Refuse to go on without root."""
    if os.geteuid() != 0:
        raise UserError(
            "a real multi-node Slurm needs root: every node has a host name and a mount namespace of its own",
            hint=f"run it as root, for example with sudo; {_LOCAL}",
        )


def check_programs(accounting: bool) -> None:
    """Name the programs that are missing and the one command that installs them."""
    needed = _PROGRAMS | (_ACCOUNTING_PROGRAMS if accounting else {})
    missing = [name for name in needed if not _is_installed(name)]
    if not missing:
        return
    packages = dict.fromkeys(needed[name] for name in missing)
    raise UserError(f"not installed: {', '.join(missing)}", hint=f"{install_line(packages)}\n  {_LOCAL}")


def install_line(packages: Iterable[str]) -> str:
    """Return how Debian's packages are installed."""
    return f"on Debian or Ubuntu: apt-get install --no-install-recommends {' '.join(packages)}"


def check_namespaces() -> None:
    """Refuse a container whose root may not make namespaces and mounts, or not drop groups."""
    environment = dict(os.environ) | {"PATH": search_path()}
    try:
        outcome = subprocess.run(
            namespaces.trial(), env=environment, capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return
    if outcome.returncode:
        raise UserError(
            f"this machine does not let a daemon have its own host name and mounts: {outcome.stderr.strip()}",
            hint=f"{_CAPABILITIES}\n  {_LOCAL}",
        )


def find_program(name: str) -> str | None:
    """Return the path of a program, also when the PATH lacks the folders of daemons."""
    return shutil.which(name, path=search_path())


def search_path() -> str:
    """Return the PATH with the directories of daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}"


def slurm_version() -> tuple[int, int]:
    """Return the version of the Slurm that is installed, such as (24, 11).

    Raises
    ------
    UserError
        If slurmctld does not print it.
    """
    outcome = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, timeout=10)
    match = re.search(r"(\d+)\.(\d+)", outcome.stdout)
    if match is None:
        raise UserError(f"slurmctld -V printed no version: {(outcome.stdout + outcome.stderr).strip()!r}")
    return int(match[1]), int(match[2])


def _is_installed(name: str) -> bool:
    if name != _MYSQL_PLUGIN:
        return find_program(name) is not None
    # Where Debian's folder does not exist, slurmdbd itself reports a missing plugin.
    folders = list(Path("/usr/lib").glob(_DEBIAN_PLUGINS))
    return not folders or any((folder / name).exists() for folder in folders)


def program(name: str) -> str:
    """Return the path of a program; raise `UserError` if it is not installed."""
    path = find_program(name)
    if path is None:
        raise UserError(f"not installed: {name}")
    return path
