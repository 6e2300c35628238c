"""The record of a sandbox that was started, its processes, and its status asked through its own commands.

A process is known by number and start time: a number alone may meanwhile belong to somebody else.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox.options import Ports, SandboxOptions, SandboxPaths
from launcher.sandbox.prerequisites import run

STARTING, UP, FAILED = "starting", "up", "failed"


@dataclass(slots=True)
class SandboxRecord:
    """The record of a sandbox, kept in ``sandbox.json`` from before its first daemon to its end."""

    options: SandboxOptions
    ports: Ports
    phase: str = STARTING
    boot_id: str = field(default_factory=lambda: boot_id())
    daemons: dict[str, Process] = field(default_factory=dict)

    @property
    def paths(self) -> SandboxPaths:
        return SandboxPaths(self.options.directory)

    @property
    def alive(self) -> dict[str, Process]:
        """The daemons that still run."""
        is_this_boot = self.boot_id == boot_id()
        return {name: each for name, each in self.daemons.items() if is_this_boot and each.is_alive}

    @property
    def missing(self) -> tuple[str, ...]:
        """The daemons that no longer run."""
        alive = self.alive
        return tuple(name for name in self.daemons if name not in alive)

    @property
    def is_up(self) -> bool:
        return self.phase == UP and not self.missing

    def save(self) -> None:
        """Write the record; a reader sees the old one or the new one."""
        text = json.dumps({"version": 1, **asdict(self)}, indent=2, default=str)
        path = self.paths.state_file
        new = path.with_suffix(".new")
        new.write_text(f"{text}\n")
        new.replace(path)


def load(directory: Path) -> SandboxRecord | None:
    """Read the record of the sandbox in a directory; `None` when there is no sandbox.

    Raise UserError if the record cannot be parsed: its processes are then unknown.
    """
    path = SandboxPaths(directory).state_file
    try:
        record = json.loads(path.read_text())
        options = record["options"]
        return SandboxRecord(
            # Without its directory it would be taken for the default sandbox, which `down` would then remove.
            options=SandboxOptions(**{**options, "directory": Path(options["directory"])}),
            ports=Ports(**record["ports"]),
            phase=record["phase"],
            boot_id=record["boot_id"],
            daemons={
                name: Process(each["pid"], each["start_time"]) for name, each in record["daemons"].items()
            },
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the record of a sandbox of this version: {error!r}",
            hint="stop the processes that it names by hand and remove the directory",
        ) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory, which must exist; raise UserError if another `up` or `down` has locked it."""
    with ExitStack() as stack:
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A `down` that held the lock a moment ago has removed the directory, perhaps for a new one.
            is_ours = os.path.samestat(os.fstat(handle), directory.stat())
        except (FileNotFoundError, BlockingIOError):
            is_ours = False
        if not is_ours:
            raise UserError(f"another process is starting or stopping the sandbox in {directory}")
        yield


# --- processes

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinguishable from a later one with the same number.

    `start_time` is in clock ticks since the machine was booted, as in ``/proc/<pid>/stat``.
    """

    pid: int
    start_time: int
    parent: int = field(default=0, compare=False)

    @property
    def is_alive(self) -> bool:
        """True if the process still runs; a zombie does not."""
        return _read(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process if it is alive."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def child(pid: int) -> Process:
    """Return the child process with this number, even if it has ended already."""
    process = _read(pid, ended=True)
    if process is None:
        raise ProcessLookupError(f"no child {pid}")
    return process


def boot_id() -> str:
    """Return the id of this boot of the machine: start times of an earlier one mean nothing."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def stop(processes: Iterable[Process], number: signal.Signals, seconds: float) -> None:
    """Send a signal to processes and wait until they end, at most some seconds."""
    remaining = list(processes)
    for process in remaining:
        process.signal(number)
    deadline = time.monotonic() + seconds
    while remaining and time.monotonic() < deadline:
        time.sleep(0.01)
        for process in remaining:
            reap(process.pid)
        remaining = [process for process in remaining if process.is_alive]


def reap(pid: int) -> int | None:
    """Collect a child that has ended and return its exit code; `None` if it runs or is no child of ours."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def processes() -> dict[int, Process]:
    """Return every process of the machine, by number."""
    numbers = (int(name) for name in os.listdir(_PROC) if name.isdecimal())  # noqa: PTH208 (speed)
    return {pid: process for pid in numbers if (process := _read(pid))}


def ancestry(pid: int, processes: dict[int, Process]) -> Iterator[int]:
    """Yield the number of a process, of its parent, of the parent's parent, and so on."""
    seen: set[int] = set()
    while pid in processes and pid not in seen:
        yield pid
        seen.add(pid)
        pid = processes[pid].parent


def mount_namespace(pid: int) -> Path:
    """Return the file of a process's mount namespace."""
    return _PROC / str(pid) / "ns" / "mnt"


def inode_of(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; `None` when they cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it cannot be read."""
    try:
        text = (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (word.partition("=") for word in text.split("\0"))
    return {name: value for name, _, value in pairs}


def _read(pid: int, ended: bool = False) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    words = text[text.rindex(b")") + 2 :].split()
    if words[0] in (b"Z", b"X") and not ended:
        return None
    return Process(pid, int(words[19]), int(words[1]))


# --- Slurm's own commands, and the status

# The user's own defaults (SQUEUE_FORMAT, SBATCH_PARTITION, ...) or the job that this runs in would change
# the commands' behavior.
_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SACCT", "SCANCEL", "SCONTROL", "PMI")


def client_environment(slurm_conf: Path) -> dict[str, str]:
    """Return this process' environment without any Slurm but the sandbox's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {"SLURM_CONF": str(slurm_conf)}


def ask(slurm_conf: Path, *command: str, seconds: float = 5) -> list[str] | None:
    """Run a command of Slurm and return its lines; `None` when it failed or had no answer in time."""
    try:
        outcome = run(*command, env=client_environment(slurm_conf), seconds=seconds)
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
    ports: Mapping[str, int] = field(default_factory=dict)
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
    record = load(directory)
    if record is None:
        return SandboxStatus(directory, "down")
    conf = record.paths.slurm_conf
    nodes = jobs = None
    if "slurmctld" not in record.missing:
        nodes = ask(conf, "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T")
    # A controller that did not answer is not asked a second time.
    if nodes is not None:
        jobs = ask(conf, "squeue", "--noheader", "--array", "--format=%T")
    options, ports = record.options, {"slurmctld": record.ports.slurmctld}
    ports |= {"slurmdbd": record.ports.slurmdbd} if options.accounting else {}
    ports |= zip(options.node_names, record.ports.slurmd, strict=True)
    return SandboxStatus(
        directory,
        phase="broken" if record.phase == UP and record.missing else record.phase,
        missing=record.missing,
        accounting=options.accounting,
        ports=ports,
        nodes=tuple(SandboxNode(*line.split(maxsplit=1)) for line in nodes or []),
        cloud_nodes=options.cloud_nodes,
        running=None if jobs is None else jobs.count("RUNNING"),
        pending=None if jobs is None else jobs.count("PENDING"),
        pyxis=options.pyxis is not None,
    )


def partition_table(slurm_conf: Path) -> list[str]:
    """Return the lines of a table of the partitions, as ``sinfo`` prints it."""
    columns = "%10P %5a %6D %6t %5c %8m %8G %N"
    return ask(slurm_conf, "sinfo", f"--format={columns}") or []
