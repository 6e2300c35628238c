"""The requirements of a sandbox, checked before a start: Slurm, Pyxis, namespaces."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import configuration
from launcher.sandbox.options import SandboxOptions, SandboxPaths

# Not a program, but a package: slurmdbd cannot connect to a database without it.
_MYSQL_PLUGIN = "accounting_storage_mysql.so"
_DEBIAN_PLUGINS = "*/slurm-wlm"
# Debian's packages, and the programs of each. `slurm-wlm` means the controller, the node daemon and the
# clients together.
_PROGRAMS = (
    ("slurm-wlm", "slurmctld slurmd sinfo squeue sbatch srun scancel"),
    ("munge", "munged"),
    ("util-linux", "unshare setpriv"),
    ("mount", "mount"),
    ("hostname", "hostname"),
)
_ACCOUNTING_PROGRAMS = (
    ("slurmdbd", "slurmdbd"),
    ("slurm-wlm-mysql-plugin", _MYSQL_PLUGIN),
    ("slurm-wlm", "sacct"),
    ("mariadb-server", "mariadbd mariadb-install-db"),
)
# The directories of daemons; `su` without a dash leaves a PATH without them.
_SYSTEM_FOLDERS = "/usr/sbin:/sbin"
_CAPABILITIES = (
    "a container needs the capabilities SYS_ADMIN and SETGID, and in a chroot SYS_CHROOT: docker run "
    "--cap-add SYS_ADMIN, where AppArmor is used also --security-opt apparmor=unconfined; or --privileged"
)
_LOCAL = "to train without Slurm and without root, use cluster=local"


def check(accounting: bool) -> None:
    """Check all requirements of a sandbox; raise UserError if one is missing, with how to install it."""
    check_root()
    check_programs(accounting)
    check_namespaces()


def check_root() -> None:
    """Raise UserError unless root runs this."""
    if os.geteuid() != 0:
        raise UserError(
            "a real multi-node Slurm needs root: every node has its own host name and mount namespace",
            hint=f"run it as root, for example with sudo; {_LOCAL}",
        )


def check_programs(accounting: bool) -> None:
    """Name the programs that are missing and the one command that installs them."""
    _require(_PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ()), f"\n  {_LOCAL}")


def _require(packages: Iterable[tuple[str, str]], advice: str = "") -> None:
    """Raise UserError if a program is missing, with the Debian packages that have it."""
    names = {name: package for package, programs in packages for name in programs.split()}
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        words = " ".join(dict.fromkeys(names[name] for name in missing))
        line = f"on Debian or Ubuntu: apt-get install --no-install-recommends {words}"
        raise UserError(f"not installed: {', '.join(missing)}", hint=f"{line}{advice}")


def check_namespaces() -> None:
    """Refuse a container where root may not create namespaces and mounts, or drop groups."""
    # slurmctld and slurmdbd drop their supplementary groups, and end where they may not.
    trial = enter("n1", {_ETC: _ETC}, ["setpriv", "--clear-groups", "true"])
    try:
        outcome = run(*trial, env={**os.environ, "PATH": search_path()})
    except subprocess.TimeoutExpired:
        return
    if outcome.returncode:
        raise UserError(
            f"this machine does not let a daemon have its own host name and mounts: {outcome.stderr.strip()}",
            hint=f"{_CAPABILITIES}\n  {_LOCAL}",
        )


def find_program(name: str) -> str | None:
    """Return the path of a program, also if PATH does not have the folders of daemons."""
    return shutil.which(name, path=search_path())


def search_path() -> str:
    """Return the PATH with the directories of daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}"


def slurm_version() -> tuple[int, int]:
    """Return the version of the Slurm that is installed, such as (24, 11)."""
    outcome = run("slurmctld", "-V")
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


def run(
    *command: str, env: Mapping[str, str] | None = None, seconds: float = 10
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, wherever it is installed; it reads no input."""
    words, null = [program(command[0]), *command[1:]], subprocess.DEVNULL
    return subprocess.run(words, env=env, stdin=null, capture_output=True, text=True, timeout=seconds)


# --- the namespaces of a daemon

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
    """Return the command that runs another one in new namespaces."""
    pairs = [str(path) for pair in mounts.items() for path in pair]
    return [
        *("unshare", "--uts", "--mount", "--propagation", "unchanged"),
        *("sh", "-c", _ISOLATE, "isolate"),
        *("sh", "-c", _ENTER, "enter", host, *pairs, "--", *command),
    ]


def write_name_files(options: SandboxOptions) -> None:
    """Write the hosts file and the nsswitch.conf of the daemons.

    They are mounted over the machine's. If one is missing there, a copy of /etc with both is mounted over
    /etc instead.
    """
    paths = SandboxPaths(options.directory)
    paths.hosts.write_text(configuration.hosts(options, socket.gethostname(), _lines(_HOSTS)))
    paths.nsswitch.write_text(configuration.nsswitch(_lines(_NSSWITCH)))
    if _HOSTS.is_file() and _NSSWITCH.is_file():
        return
    # `cp`, for sockets and other special files; mounts below /etc are copied too.
    outcome = run("cp", "--archive", str(_ETC), str(paths.private_etc), seconds=600)
    if outcome.returncode:
        raise UserError(f"cannot copy {_ETC}, where a file is missing: {outcome.stderr.strip()}")
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


# --- containers

PLUGIN = "spank_pyxis.so"
# Where `make install` and the packages put it, next to the folder that Slurm loads its own plugins from.
_FOLDERS = (
    "/usr/local/lib/slurm",
    "/usr/lib/slurm",
    "/usr/lib64/slurm",
    "/usr/lib/*/slurm",
    "/usr/lib/*/slurm-wlm",
    "/opt/slurm/lib/slurm",
    "/opt/slurm/lib64/slurm",
)
# Programs that Enroot calls to create and start a container from a squashfs, with Debian's packages of them.
_CONTAINER_PROGRAMS = (
    ("squashfs-tools", "unsquashfs"),
    ("gawk", "awk"),
    ("libc-bin", "getent"),
    ("passwd", "pwck"),
)
_BUILD = (
    "docs/pyxis.md explains how to install both, from their releases or from github.com/NVIDIA/{enroot,pyxis}"
)


def find_plugin() -> Path:
    """Return Pyxis' plugin, from Enroot's folder or the usual folders of Slurm's plugins."""
    folders = list(_FOLDERS)
    if (enroot := find_program("enroot")) is not None:
        prefix = Path(enroot).resolve().parent.parent
        folders[:0] = [str(prefix / "lib/slurm"), str(prefix / "lib64/slurm")]
    for folder in folders:
        # Patterns are relative to the root in pathlib.
        for plugin in sorted(Path("/").glob(f"{folder.lstrip('/')}/{PLUGIN}")):
            return plugin
    raise UserError(
        f"Pyxis is not installed: {PLUGIN} is in none of {', '.join(dict.fromkeys(folders))}",
        hint=f"name it: slipway sandbox up --pyxis /path/to/{PLUGIN}\n  {_BUILD}",
    )


def check_containers(plugin: Path) -> None:
    """Check the further requirements of a sandbox with containers."""
    try:
        with plugin.open("rb") as file:
            fault = "" if file.read(4) == b"\x7fELF" else " is not a shared library"
    except OSError as error:
        fault = f": {error.strerror}"
    if fault:
        raise UserError(f"--pyxis {plugin}{fault}", hint=f"name the file {PLUGIN}")
    if find_program("enroot") is None:
        beside = plugin.resolve().parents[2] / "bin" if len(plugin.resolve().parents) > 2 else None
        is_there = beside is not None and (beside / "enroot").exists()
        hint = f'export PATH="{beside}:$PATH"' if is_there else _BUILD
        raise UserError("not installed: enroot, which starts the containers for Pyxis", hint=hint)
    _require(_CONTAINER_PROGRAMS)
    outcome = run("unshare", "--user", "--mount", "true")
    if outcome.returncode:
        raise UserError(
            f"Enroot cannot create a user namespace on this machine: {outcome.stderr.strip()}",
            hint="sysctl user.max_user_namespaces must not be 0, and in a container SYS_ADMIN is needed",
        )


def site_configuration() -> Path:
    """Return the enroot.conf that Enroot reads on this machine, or raise UserError."""
    # Enroot creates its folders at every call: below a scratch directory, and not in the user's home.
    with tempfile.TemporaryDirectory() as scratch:
        folders = {f"ENROOT_{name}_PATH": f"{scratch}/{name}" for name in ("CACHE", "DATA", "RUNTIME")}
        outcome = run("enroot", "info", env={**os.environ, **folders}, seconds=30)
    for line in outcome.stdout.splitlines():
        key, _, value = line.partition(":")
        if key == "Config file" and Path(value.strip()).is_file():
            return Path(value.strip())
    output = (outcome.stderr or outcome.stdout).strip()
    raise UserError(
        f"`enroot info` names no configuration file that exists: {output}",
        hint="install Enroot 3.4 or newer with its enroot.conf; an empty file will do",
    )
