"""The options of a sandbox, and the free ports on loopback that it takes."""

from __future__ import annotations

import re
import socket
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from launcher.errors import UserError
from launcher.sandbox import default_directory

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
