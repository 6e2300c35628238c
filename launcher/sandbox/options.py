"""What a user may choose about a sandbox."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
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
class Options:
    """The size and the place of a sandbox.

    Parameters
    ----------
    directory
        Everything the sandbox writes lies under it, and goes with it.
    nodes
        Nodes with a slurmd that run jobs.
    gpus, cpus
        What every node offers. Both are claims: jobs share the processors of this machine.
    gpu_type
        The type that the GPUs claim to have, such as ``a100``; `None` for no type.
    accounting
        Run a private MariaDB and slurmdbd too, so that ``sacct`` answers.
    accounts, qos
        Accounts and qualities of service that whoever boots it may use; with them Slurm refuses all others.
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
                told = f"--pyxis {str(self.pyxis)!r}: plugstack.conf cannot quote a path"
                raise UserError(told, hint="a link to it, of letters, digits and . _ + @ -, will do")
        self._check_names()

    def _check_names(self) -> None:
        named = {"gpu-type": [self.gpu_type] if self.gpu_type is not None else []}
        named |= {"account": list(self.accounts), "qos": list(self.qos)}
        for flag, names in named.items():
            for name in names:
                if not _NAME.fullmatch(name):
                    raise UserError(f"--{flag} {name!r}: expected small letters, digits, _ and -")
        if self.is_enforced and not self.accounting:
            raise UserError(
                f"--{'account' if self.accounts else 'qos'} needs a database of accounts",
                hint="slipway sandbox up --accounting",
            )

    @property
    def is_enforced(self) -> bool:
        """Whether Slurm refuses jobs of accounts and QOS that there are not."""
        return bool(self.accounts or self.qos)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))

    def differences(self, other: Options) -> list[str]:
        """Say in what this sandbox, which is up, differs from another that is asked for."""
        found = []
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "base_port" and theirs is None:
                continue
            if mine != theirs:
                found.append(f"{each.name.replace('_', ' ')} {_word(mine)}, asked for {_word(theirs)}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "directory": str(self.directory),
            "pyxis": None if self.pyxis is None else str(self.pyxis),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        # A sandbox that an older version booted has not all of the options.
        lists = {name: tuple(record.get(name, ())) for name in ("accounts", "qos")}
        pyxis = record.get("pyxis")
        paths = {"directory": Path(record["directory"]), "pyxis": None if pyxis is None else Path(pyxis)}
        return cls(**record | lists | paths)


def _word(value: object) -> str:
    if value is None or isinstance(value, tuple):
        return ",".join(value or ()) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
