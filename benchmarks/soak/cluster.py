"""A sandbox that can be broken, with the zygotes that train and launch on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak import zygote
from launcher.sandbox import Reporter, state
from launcher.sandbox.daemons import DaemonStarter
from launcher.sandbox.state import Process, SandboxRecord, client_environment, load

ROOT = Path(__file__).resolve().parents[2]
LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "STOPPED", "SIGNALING")
PREFIX = "soak-"
SANDBOX = "s"  # short: sockets are below it


class NotPossible(Exception):
    """Something that this machine lacks, so that a fault is skipped."""


@dataclass(frozen=True, slots=True)
class Job:
    """The last state of a job that Slurm reported."""

    id: str
    name: str
    state: str
    nodes: str

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command of the launcher."""

    code: int
    stdout: str
    stderr: str


class Cluster:
    """A sandbox, its jobs as they were half a second ago, and ways to break it."""

    def __init__(self, directory: Path, size: int, rank_socket: Path, launch_socket: Path) -> None:
        self.directory, self.size, self._launch_socket = directory, size, launch_socket
        self._sandbox = sandbox = directory / SANDBOX
        self.results = directory / "results"
        self.conf = sandbox / "etc" / "slurm.conf"
        self.environment = {
            **client_environment(self.conf),
            "TMPDIR": str(directory),
            "SLIPWAY_CACHE_DIR": str(directory / "cache"),
            "COLUMNS": "250",
        }
        self.interpreter = directory / "python"
        self.interpreter.write_text(
            "#!/bin/bash\n"
            "[[ ${SLURM_JOB_ID:-} ]] || exit 0\n"  # the launcher asks what it has
            f'exec "{sys.executable}" -ISE "{zygote.__file__}" client "{rank_socket}" "$@"\n'
        )
        self.interpreter.chmod(0o755)
        self._lock = threading.RLock()
        self._news = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._looks = 0
        self.zygotes: list[subprocess.Popen[str]] = []
        self.all_jobs: set[tuple[str, str]] = set()  # names and ids of all jobs that there were

    @property
    def is_whole(self) -> bool:
        """Return False if a zygote has ended, so that runs fail for want of it."""
        return all(zygote.poll() is None for zygote in self.zygotes)

    # --- asking ---

    def slurm(self, *words: str, seconds: float = 30) -> str:
        """Run a command of Slurm's, which must succeed; return what it printed."""
        result = subprocess.run(
            words, env=self.environment, cwd=self.directory, capture_output=True, text=True, timeout=seconds
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(words)}: {result.stdout}{result.stderr}")
        return result.stdout

    def look(self) -> None:
        """Ask for all jobs once; one that Slurm has forgotten is no longer there."""
        form = "--format=%i|%j|%T|%N"
        try:
            output = self.slurm("squeue", "--noheader", "--states=all", form, seconds=8)
        except (RuntimeError, subprocess.TimeoutExpired):
            return
        jobs = [Job(*line.split("|", 3)) for line in output.splitlines() if line.count("|") == 3]
        with self._news:
            self._jobs = {job.id: job for job in jobs}
            self.all_jobs |= {(job.name, job.id) for job in jobs}
            self._looks += 1
            self._news.notify_all()

    def jobs(self, run: str, fresh: int = 0) -> list[Job]:
        """Return the jobs of a run, of a look that began after this call with `fresh=2`."""
        with self._news:
            least = self._looks + fresh
            deadline = time.monotonic() + 120
            while self._looks < least and time.monotonic() < deadline:
                self._news.wait(5)
            return [job for job in self._jobs.values() if job.name == PREFIX + run]

    def order(self, *words: str, **order: Any) -> tuple[Any, Path, Path]:
        """Begin a command of the launcher, in a process of its own; return the connection and its outputs."""
        environment = self.environment | order.pop("environment", {})
        with ExitStack() as stack:
            outputs = [tempfile.mkstemp(dir=self.directory, prefix=".verb-") for _ in range(2)]
            for handle, _ in outputs:
                stack.callback(os.close, handle)
            devnull = stack.enter_context(Path(os.devnull).open())
            files = (devnull.fileno(), outputs[0][0], outputs[1][0])
            request = {"arguments": ["launcher.main", *words], "environment": environment, **order}
            request["directory"] = str(self.directory)
            return (
                zygote.connect(str(self._launch_socket), request, files),
                Path(outputs[0][1]),
                Path(outputs[1][1]),
            )

    def slipway(self, *words: str, **order: Any) -> CommandResult:
        """Run a command of the launcher, as a process of its own."""
        connection, out, err = self.order(*words, **order)
        try:
            *_, code = zygote.answers(connection)
            return CommandResult(code, out.read_text(), err.read_text())
        finally:
            connection.close()
            out.unlink()
            err.unlink()

    # --- processes ---

    @property
    def _state(self) -> SandboxRecord:
        state = load(self._sandbox)
        assert state
        return state

    def keeper(self, job: str) -> int | None:
        """Return the main process of a job's batch step, which keeps the job on its batch host."""
        processes = state.processes()
        for pid, entry in processes.items():
            # The title may be cut off before its bracket.
            if re.match(rf"slurmstepd: \[{job}\.(batch|4294967291)\b", _words(pid)):
                children = [child for child, process in processes.items() if process.parent == entry.pid]
                return next((child for child in children if not _words(child).startswith("slurmstepd")), None)
        return None

    def srun(self, job: str) -> int | None:
        """Return the srun that started the tasks of a job."""
        processes = state.processes()
        sruns = {pid for pid in processes if _comm(pid) == "srun" and self._job_of(pid) == job}
        return min((pid for pid in sruns if processes[pid].parent not in sruns), default=None)

    def leftover_processes(self, jobs: set[str]) -> list[str]:
        """Return the processes of jobs that still run."""
        return [f"{pid} {_words(pid)[:80]}" for pid in state.processes() if self._job_of(pid) in jobs]

    def _job_of(self, pid: int) -> str | None:
        """Return the job of this cluster that a process is of."""
        variables = state.environment(pid)
        return variables.get("SLURM_JOB_ID") if variables.get("SLURM_CONF") == str(self.conf) else None

    def mounts(self) -> list[str]:
        """Return the mount points of nodes alone, and those below this cluster's directory."""
        machine = _mount_points(os.getpid())
        points = [f"machine {point}" for point in machine if point.startswith(str(self.directory))]
        for node, daemon in self._state.daemons.items():
            if daemon.is_alive:
                points += [f"{node} {point}" for point in _mount_points(daemon.pid) - machine]
        return sorted(points)

    # --- breaking ---

    def kill_node(self, name: str) -> None:
        """Cut a node's power: all its processes end at once, without a report."""
        with self._lock:
            daemon = self._state.daemons[name]
        namespace = state.mount_namespace(daemon.pid)
        with namespace.open("rb"):  # kept, so that its number is not given to another
            inode = namespace.stat().st_ino
            daemon.signal(signal.SIGKILL)
            while mates := [pid for pid in state.processes() if _namespace(pid) == inode]:
                for pid in mates:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
                state.reap(daemon.pid)

    def revive_node(self, name: str) -> None:
        """Boot a node again."""
        self._start(name, ["slurmd", "-D", "-f", str(self.conf)], host=name)

    @property
    def controller(self) -> Process:
        """Return the process of slurmctld."""
        return self._state.daemons["slurmctld"]

    @property
    def controller_log(self) -> Path:
        """Return the log of slurmctld."""
        return self._state.paths.logs / "slurmctld.log"

    def kill_controller(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Stop slurmctld; at SIGTERM it saves its state."""
        state.stop([self.controller], number, 30)

    def start_controller(self, *, forgetful: bool = False) -> None:
        """Start slurmctld again; `forgetful`: without its state, and with other numbers for jobs."""
        if forgetful:
            spool = self._state.paths.controller_state
            shutil.rmtree(spool)
            spool.mkdir()
            self.configure(r"(FirstJobId=)(\d+)", lambda match: f"{match[1]}{int(match[2]) + 1000}")
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        self.until("slurmctld answers", lambda: _succeeds(self.slurm, "scontrol", "ping"))

    def configure(self, line: str, new: str | Callable[[re.Match[str]], str]) -> None:
        """Replace a line of slurm.conf, for daemons that are started later."""
        self.conf.write_text(re.sub(f"(?m)^{line}$", new, self.conf.read_text()))

    def resume_nodes(self) -> None:
        """Take nodes back into service that Slurm has drained, as one where two jobs had the same number."""
        states = self.slurm("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t").splitlines()
        for node, condition in (line.split() for line in states):
            if condition.startswith("drain"):
                self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _start(self, name: str, command: list[str], **options: Any) -> None:
        with self._lock:
            DaemonStarter(self._state, Reporter()).start(name, command, **options)

    def until(self, description: str, condition: Callable[[], object], seconds: float = 240) -> None:
        """Wait for something that is bound to happen."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"in vain: {description}")
            time.sleep(0.05)

    # --- clocks ---

    def set_clock(self, node: str, seconds: int | None) -> None:
        """Shift the clock that later jobs on a node see by some seconds; None sets it right again."""
        path = self.directory / "clocks" / node
        path.unlink(missing_ok=True)
        if seconds is not None:
            path.write_text(str(seconds))


def read_journal(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the journal of the ranks' zygote: the starts and ends of each job's processes."""
    path = cluster.directory.parent / "ranks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _succeeds(function: Callable[..., object], *arguments: str) -> bool:
    try:
        function(*arguments)
    except (RuntimeError, subprocess.TimeoutExpired):
        return False
    return True


def _mount_points(pid: int) -> set[str]:
    try:
        return {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    except OSError:
        return set()


def _words(pid: int) -> str:
    try:
        return (
            (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _comm(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _namespace(pid: int) -> int | None:
    try:
        return state.mount_namespace(pid).stat().st_ino
    except OSError:
        return None
