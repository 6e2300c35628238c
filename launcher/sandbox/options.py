"""The options of a sandbox, its paths, and the free ports on loopback that it takes."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.sandbox import STATE_FILE, default_directory, slurm_conf_path

# slurm.conf has no quoting: a blank, a comma or a bracket in a path would be read as something else.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._+@/-]*")
# Names that both Slurm's files and sacctmgr take as they are.
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "directory": lambda value: Path(value).resolve(),
    "pyxis": lambda value: Path(value).absolute(),
    "accounts": tuple,
    "qos": tuple,
}
_LIMITS = {"nodes": (1, 256), "gpus": (1, 64), "cpus": (1, 1024), "cloud_nodes": (0, 16384)}


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """The size and the place of a sandbox; GPUs and processors are claims: jobs share the machine's."""

    # Holds everything that the sandbox writes, and is removed with it.
    directory: Path = field(default_factory=default_directory)
    nodes: int = 4
    # Of every node.
    gpus: int = 8
    cpus: int = 64
    # A private MariaDB and slurmdbd, so that ``sacct`` answers.
    accounting: bool = False
    # Nodes of the partition that only ``sbatch --test-only`` can use; 0 for no such partition.
    cloud_nodes: int = 1024
    # The first of the ports; `None` chooses free ones.
    base_port: int | None = None
    # Such as ``a100``.
    gpu_type: str | None = None
    # Accounts and QOS of the user who boots it; Slurm then refuses all others.
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    # Pyxis' plugin, ``spank_pyxis.so``; `None` for no containers.
    pyxis: Path | None = None

    def __post_init__(self) -> None:
        # A record on disk has texts and lists.
        for name, convert in _CONVERSIONS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, convert(value))
        if not _PLAIN_PATH.fullmatch(str(self.directory)):
            raise UserError(
                f"a sandbox cannot live in {str(self.directory)!r}: slurm.conf cannot quote a path",
                hint="choose a directory of letters, digits and . _ + @ - with --dir",
            )
        for name, (low, high) in _LIMITS.items():
            if not low <= getattr(self, name) <= high:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}: expected {low} to {high}")
        if self.pyxis is not None and not _PLAIN_PATH.fullmatch(str(self.pyxis)):
            message = f"--pyxis {str(self.pyxis)!r}: plugstack.conf cannot quote a path"
            raise UserError(message, hint="a link to it, of letters, digits and . _ + @ -, will do")
        types = () if self.gpu_type is None else (self.gpu_type,)
        for flag, names in (("gpu-type", types), ("account", self.accounts), ("qos", self.qos)):
            for name in names:
                if not _NAME.fullmatch(name):
                    raise UserError(f"--{flag} {name!r}: expected lower-case letters, digits, _ and -")
        if self.is_enforced and not self.accounting:
            raise UserError(
                f"--{'account' if self.accounts else 'qos'} needs a database of accounts",
                hint="slipway sandbox up --accounting",
            )

    @property
    def is_enforced(self) -> bool:
        """True if Slurm refuses jobs with an unknown account or QOS."""
        return bool(self.accounts or self.qos)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))

    def differences(self, other: SandboxOptions) -> list[str]:
        """Return in words how these options, of a sandbox that is up, differ from requested ones."""
        differences = []
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "base_port" and theirs is None:
                continue
            if mine != theirs:
                differences.append(f"{each.name.replace('_', ' ')} {_word(mine)}, requested {_word(theirs)}")
        return differences


def _word(value: object) -> str:
    if value is None or isinstance(value, tuple):
        return ",".join(value or ()) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# Below the ports that the kernel hands to outgoing connections (from 32768), which come and go.
_FIRST, _LAST = 17000, 32000


@dataclass(frozen=True, slots=True)
class Ports:
    """A block of consecutive ports: slurmctld, slurmdbd (kept even when unused), one per node."""

    base: int
    nodes: int

    @property
    def slurmctld(self) -> int:
        return self.base

    @property
    def slurmdbd(self) -> int:
        return self.base + 1

    @property
    def slurmd(self) -> range:
        return range(self.base + 2, self.base + 2 + self.nodes)


def choose_ports(options: SandboxOptions) -> Ports:
    """Find a block of free ports, or check the requested one.

    The search starts at a port derived from the directory: a sandbox tends to get its old ports back, and
    two that start at the same moment do not try the same ones. Raise UserError if no block is free, or a port
    of the requested one is taken.
    """
    size, base = options.nodes + 2, options.base_port
    if base is not None:
        if not 1024 <= base <= 65536 - size:
            raise UserError(f"--base-port {base}: expected 1024 to {65536 - size}, for {size} ports in a row")
        taken = next((port for port in range(base, base + size) if not is_free(port)), None)
        if taken is not None:
            raise UserError(
                f"--base-port {base}: port {taken} is taken; the sandbox needs {base} to {base + size - 1}",
                hint="omit --base-port to get free ports",
            )
        return Ports(base, options.nodes)
    slots = (_LAST - _FIRST) // size
    first = zlib.crc32(bytes(options.directory)) % slots
    for slot in range(slots):
        base = _FIRST + (first + slot) % slots * size
        if all(is_free(port) for port in range(base, base + size)):
            return Ports(base, options.nodes)
    raise UserError(f"no {size} consecutive free ports between {_FIRST} and {_LAST}")


def is_free(port: int) -> bool:
    """Return True if a daemon could listen on a port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Slurm does: connections that linger after a close are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


# --- paths

# sockaddr_un.sun_path holds 108 bytes, the last of them a zero.
_SOCKET_PATH_LIMIT = 107


class SandboxPaths:
    """The files and folders under a sandbox's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state_file = directory / STATE_FILE
        self.devices = directory / "dev"
        self.logs = directory / "log"
        self.run = directory / "run"
        self.controller_state = directory / "state"
        self.spool = directory / "spool"
        self.etc = etc = directory / "etc"
        self.slurm_conf = slurm_conf_path(directory)
        self.slurmdbd_conf = etc / "slurmdbd.conf"
        self.plugstack_conf = etc / "plugstack.conf"
        self.hosts = etc / "hosts"
        self.nsswitch = etc / "nsswitch.conf"
        # A copy of the machine's /etc, for a machine without a file in /etc that the daemons need.
        self.private_etc = directory / "private-etc"
        # Included by slurm.conf; the daemons see the second in place of the first.
        self.communication = etc / "communication.conf"
        self.daemon_communication = etc / "communication-of-daemons.conf"
        self.munge = directory / "munge"
        self.munge_key = self.munge / "key"
        self.munge_socket = self.munge / "socket"
        self.database = directory / "mysql"
        # MariaDB's own: when one starts it removes the temporary tables of any other in the same folder.
        self.database_temporary = directory / "mysql-tmp"
        self.database_socket = self.run / "mysql.sock"
        # SQL that mariadbd runs before it answers.
        self.database_setup = etc / "database.sql"
        # A folder for every node, and an empty one on which each node sees its own, for Enroot and Pyxis.
        self.containers = directory / "containers"
        self.own_containers = self.containers / "own"
        # Seen on a node in place of the machine's own.
        self.enroot_conf = etc / "enroot.conf"

    def output(self, daemon: str) -> Path:
        """Return the file of a daemon's standard output and error."""
        return self.logs / f"{daemon}.out"

    def check_socket_length(self, nodes: int) -> None:
        """Raise UserError if the longest socket path, of a job step on the last node, is too long."""
        node = f"n{nodes}"
        longest = self.spool / node / f"{node}_99999999.4294967295"
        excess = len(str(longest).encode()) - _SOCKET_PATH_LIMIT
        if excess > 0:
            raise UserError(
                f"the path of the sandbox is too long by {excess} characters: {self.directory}\n"
                f"  Slurm puts Unix sockets in it, such as {longest}, of at most {_SOCKET_PATH_LIMIT} bytes.",
                hint="choose a shorter one with --dir",
            )
