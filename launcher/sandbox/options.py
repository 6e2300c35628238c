"""The options of a sandbox, its paths, and the free ports on loopback that it takes."""

from __future__ import annotations

import re
import socket
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from launcher.errors import UserError
from launcher.sandbox import STATE_FILE, default_directory, slurm_conf_path

# slurm.conf has no quoting: a blank, a comma or a bracket in a path would be read as something else.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._+@/-]*")
# Names that both Slurm's files and sacctmgr take as they are.
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_LIMITS = {"nodes": (1, 256), "gpus": (1, 64), "cpus": (1, 1024), "cloud_nodes": (0, 16384)}


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """The size and the place of a sandbox.

    Parameters
    ----------
    directory
        The directory of everything that the sandbox writes, removed with it.
    nodes
        Nodes with a slurmd that run jobs.
    gpus, cpus
        Resources of every node. Both are claims: jobs share the processors of this machine.
    gpu_type
        The type that the GPUs claim to have, such as ``a100``; `None` for no type.
    accounting
        Run a private MariaDB and slurmdbd too, so that ``sacct`` answers.
    accounts, qos
        Accounts and qualities of service that the user who boots it may use; Slurm then refuses all others.
    cloud_nodes
        Nodes of the partition that only ``sbatch --test-only`` can use; 0 for no such partition.
    base_port
        First of the ports; `None` chooses free ones.
    pyxis
        Pyxis' plugin, ``spank_pyxis.so``: jobs may then run in containers; `None` for no containers.
    """

    directory: Path = field(default_factory=default_directory)
    nodes: int = 4
    gpus: int = 8
    cpus: int = 64
    accounting: bool = False
    cloud_nodes: int = 1024
    base_port: int | None = None
    gpu_type: str | None = None
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    pyxis: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", self.directory.resolve())
        if not _PLAIN_PATH.fullmatch(str(self.directory)):
            raise UserError(
                f"a sandbox cannot live in {str(self.directory)!r}: slurm.conf cannot quote a path",
                hint="choose a directory of letters, digits and . _ + @ - with --dir",
            )
        for name, (low, high) in _LIMITS.items():
            if not low <= getattr(self, name) <= high:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}: expected {low} to {high}")
        if self.pyxis is not None:
            object.__setattr__(self, "pyxis", self.pyxis.absolute())
            if not _PLAIN_PATH.fullmatch(str(self.pyxis)):
                message = f"--pyxis {str(self.pyxis)!r}: plugstack.conf cannot quote a path"
                raise UserError(message, hint="a link to it, of letters, digits and . _ + @ -, will do")
        self._check_names()

    def _check_names(self) -> None:
        named = {"gpu-type": [self.gpu_type] if self.gpu_type is not None else []}
        named |= {"account": list(self.accounts), "qos": list(self.qos)}
        for flag, names in named.items():
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

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "directory": str(self.directory),
            "pyxis": None if self.pyxis is None else str(self.pyxis),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        # The record of a sandbox that an older version booted lacks some of the options.
        lists = {name: tuple(record.get(name, ())) for name in ("accounts", "qos")}
        pyxis = record.get("pyxis")
        paths = {"directory": Path(record["directory"]), "pyxis": None if pyxis is None else Path(pyxis)}
        return cls(**record | lists | paths)


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(**record)


def choose_ports(options: SandboxOptions) -> Ports:
    """Find a block of free ports, or check the requested one.

    The search starts at a port derived from the directory: a sandbox tends to get its old ports back, and
    two that start at the same moment do not try the same ones.

    Raises
    ------
    UserError
        If a port of the requested block is taken, or if no block is free.
    """
    size = options.nodes + 2
    if options.base_port is not None:
        _check_block(options.base_port, size)
        return Ports(options.base_port, options.nodes)
    slots = (_LAST - _FIRST) // size
    first = zlib.crc32(bytes(options.directory)) % slots
    for slot in range(slots):
        base = _FIRST + (first + slot) % slots * size
        if all(is_free(port) for port in range(base, base + size)):
            return Ports(base, options.nodes)
    raise UserError(f"no {size} consecutive free ports between {_FIRST} and {_LAST}")


def _check_block(base: int, size: int) -> None:
    if not 1024 <= base <= 65536 - size:
        raise UserError(f"--base-port {base}: expected 1024 to {65536 - size}, for {size} ports in a row")
    taken = [port for port in range(base, base + size) if not is_free(port)]
    if taken:
        raise UserError(
            f"--base-port {base}: port {taken[0]} is taken; the sandbox needs {base} to {base + size - 1}",
            hint="omit --base-port to get free ports",
        )


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


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    """The files and folders under a sandbox's directory."""

    directory: Path

    @property
    def state_file(self) -> Path:
        return self.directory / STATE_FILE

    @property
    def slurm_conf(self) -> Path:
        return slurm_conf_path(self.directory)

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.etc / "slurmdbd.conf"

    @property
    def hosts(self) -> Path:
        return self.etc / "hosts"

    @property
    def nsswitch(self) -> Path:
        return self.etc / "nsswitch.conf"

    @property
    def private_etc(self) -> Path:
        """A copy of the machine's /etc, for a machine whose /etc lacks a file that the daemons need."""
        return self.directory / "private-etc"

    @property
    def communication(self) -> Path:
        """Included by slurm.conf; the daemons see `daemon_communication` in its place."""
        return self.etc / "communication.conf"

    @property
    def daemon_communication(self) -> Path:
        return self.etc / "communication-of-daemons.conf"

    @property
    def devices(self) -> Path:
        return self.directory / "dev"

    @property
    def logs(self) -> Path:
        return self.directory / "log"

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def controller_state(self) -> Path:
        return self.directory / "state"

    @property
    def spool(self) -> Path:
        return self.directory / "spool"

    @property
    def munge(self) -> Path:
        return self.directory / "munge"

    @property
    def munge_key(self) -> Path:
        return self.munge / "key"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def database(self) -> Path:
        return self.directory / "mysql"

    @property
    def database_temporary(self) -> Path:
        """MariaDB's own: when one starts it removes the temporary tables of any other in the same folder."""
        return self.directory / "mysql-tmp"

    @property
    def database_socket(self) -> Path:
        return self.run / "mysql.sock"

    @property
    def database_setup(self) -> Path:
        """SQL that mariadbd runs before it answers."""
        return self.etc / "database.sql"

    @property
    def containers(self) -> Path:
        """The parent of a folder for every node, and of `own_containers`."""
        return self.directory / "containers"

    @property
    def own_containers(self) -> Path:
        """The folder of Enroot and Pyxis as a node sees it: `containers_of` that node; empty elsewhere."""
        return self.containers / "own"

    def containers_of(self, node: str) -> Path:
        return self.containers / node

    @property
    def enroot_conf(self) -> Path:
        """Seen on a node in place of the machine's own."""
        return self.etc / "enroot.conf"

    @property
    def plugstack_conf(self) -> Path:
        return self.etc / "plugstack.conf"

    def output(self, daemon: str) -> Path:
        """Return the file of a daemon's standard output and error."""
        return self.logs / f"{daemon}.out"

    def check_socket_length(self, nodes: int) -> None:
        """Refuse a directory in which the paths of sockets exceed the kernel's limit.

        Raises
        ------
        UserError
            If the longest socket path, that of a job step on the last node, is too long.
        """
        node = f"n{nodes}"
        longest = self.spool / node / f"{node}_99999999.4294967295"
        excess = len(str(longest).encode()) - _SOCKET_PATH_LIMIT
        if excess > 0:
            raise UserError(
                f"the path of the sandbox is too long by {excess} characters: {self.directory}\n"
                f"  Slurm puts Unix sockets in it, such as {longest}, of at most {_SOCKET_PATH_LIMIT} bytes.",
                hint="choose a shorter one with --dir",
            )
