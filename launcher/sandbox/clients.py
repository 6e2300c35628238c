"""The sandbox's Slurm, asked through its own commands, and the status of a sandbox."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launcher.sandbox import state
from launcher.sandbox.prerequisites import program
from launcher.sandbox.state import SandboxRecord

# A user's own defaults (SQUEUE_FORMAT, SBATCH_PARTITION, ...) or the job that this runs in would change
# what the commands do.
_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SACCT", "SCANCEL", "SCONTROL", "PMI")


def client_environment(slurm_conf: Path) -> dict[str, str]:
    """Return this process' environment without any Slurm but the sandbox's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {"SLURM_CONF": str(slurm_conf)}


def ask(slurm_conf: Path, *command: str, seconds: float = 5) -> list[str] | None:
    """Run a command of Slurm and return its lines; `None` when it failed or had no answer in time."""
    try:
        outcome = subprocess.run(
            [program(command[0]), *command[1:]],
            env=client_environment(slurm_conf),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None
    return outcome.stdout.splitlines() if outcome.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class SandboxNode:
    """A node and its state in Slurm's words, such as ``idle`` or ``mixed``."""

    name: str
    state: str


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """The status of a sandbox.

    `phase` is ``up``; ``down``; ``starting``, which may have been interrupted; ``failed``, when a daemon did
    not start; or ``broken``, when some daemons no longer run, which `missing` names. `running` and `pending`
    count jobs, each task of an array separately; they are `None`, and `nodes` is empty, when the controller
    does not answer.
    """

    directory: Path
    phase: str
    missing: tuple[str, ...] = ()
    accounting: bool = False
    ports: tuple[tuple[str, int], ...] = ()
    nodes: tuple[SandboxNode, ...] = ()
    cloud_nodes: int = 0
    running: int | None = None
    pending: int | None = None
    pyxis: bool = False

    @property
    def is_up(self) -> bool:
        return self.phase == "up"


def status(directory: Path) -> SandboxStatus:
    """Return the status of the sandbox in a directory; a sandbox that is down is no error."""
    directory = directory.resolve()
    record = state.load(directory)
    if record is None:
        return SandboxStatus(directory, "down")
    conf = record.paths.slurm_conf
    nodes = jobs = None
    if "slurmctld" not in record.missing:
        nodes = ask(conf, "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T")
    # A controller that did not answer is not asked a second time.
    if nodes is not None:
        jobs = ask(conf, "squeue", "--noheader", "--array", "--format=%T")
    return SandboxStatus(
        directory,
        phase="broken" if record.phase == state.UP and record.missing else record.phase,
        missing=record.missing,
        accounting=record.options.accounting,
        ports=_ports(record),
        nodes=tuple(SandboxNode(*line.split(maxsplit=1)) for line in nodes or []),
        cloud_nodes=record.options.cloud_nodes,
        running=None if jobs is None else jobs.count("RUNNING"),
        pending=None if jobs is None else jobs.count("PENDING"),
        pyxis=record.options.pyxis is not None,
    )


def _ports(record: SandboxRecord) -> tuple[tuple[str, int], ...]:
    ports = {"slurmctld": record.ports.slurmctld}
    if record.options.accounting:
        ports["slurmdbd"] = record.ports.slurmdbd
    ports |= dict(zip(record.options.node_names, record.ports.slurmd, strict=True))
    return tuple(ports.items())


def partition_table(slurm_conf: Path) -> list[str]:
    """Return the lines of a table of the partitions, as ``sinfo`` prints it."""
    columns = "%10P %5a %6D %6t %5c %8m %8G %N"
    return ask(slurm_conf, "sinfo", f"--format={columns}") or []
