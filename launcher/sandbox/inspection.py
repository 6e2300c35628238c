"""Looking at a sandbox without changing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.sandbox import state
from launcher.sandbox.clients import ask
from launcher.sandbox.state import State


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its state in Slurm's words, such as ``idle`` or ``mixed``."""

    name: str
    state: str


@dataclass(frozen=True, slots=True)
class Status:
    """What can be said of a sandbox.

    `phase` is ``up``; ``down``; ``starting``, which may have been cut short; ``failed``, when a daemon did
    not start; or ``broken``, when some no longer run, which `missing` names. `running` and `pending` count
    jobs, each task of an array for itself; they are `None`, and `nodes` is empty, when the controller does
    not answer.
    """

    directory: Path
    phase: str
    missing: tuple[str, ...] = ()
    accounting: bool = False
    ports: tuple[tuple[str, int], ...] = ()
    nodes: tuple[Node, ...] = ()
    cloud_nodes: int = 0
    running: int | None = None
    pending: int | None = None
    pyxis: bool = False

    @property
    def is_up(self) -> bool:
        return self.phase == "up"


def status(directory: Path) -> Status:
    """Look at the sandbox in a directory; never raises because it is down."""
    directory = directory.resolve()
    found = state.load(directory)
    if found is None:
        return Status(directory, "down")
    conf = found.layout.slurm_conf
    nodes = jobs = None
    if "slurmctld" not in found.missing:
        nodes = ask(conf, "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T")
    # A controller that did not answer is not waited for twice.
    if nodes is not None:
        jobs = ask(conf, "squeue", "--noheader", "--array", "--format=%T")
    return Status(
        directory,
        phase="broken" if found.phase == state.UP and found.missing else found.phase,
        missing=found.missing,
        accounting=found.options.accounting,
        ports=_ports(found),
        nodes=tuple(Node(*line.split(maxsplit=1)) for line in nodes or []),
        cloud_nodes=found.options.cloud_nodes,
        running=None if jobs is None else jobs.count("RUNNING"),
        pending=None if jobs is None else jobs.count("PENDING"),
        pyxis=found.options.pyxis is not None,
    )


def _ports(found: State) -> tuple[tuple[str, int], ...]:
    ports = {"slurmctld": found.ports.slurmctld}
    if found.options.accounting:
        ports["slurmdbd"] = found.ports.slurmdbd
    ports |= dict(zip(found.options.node_names, found.ports.slurmd, strict=True))
    return tuple(ports.items())


def partition_table(slurm_conf: Path) -> list[str]:
    """Return the lines of a table of the partitions, as ``sinfo`` prints it."""
    columns = "%10P %5a %6D %6t %5c %8m %8G %N"
    return ask(slurm_conf, "sinfo", f"--format={columns}") or []
