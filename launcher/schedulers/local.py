"""No queue: the script is a background process of this machine, and its pid the job's id."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.paths import log_prefix_beside
from launcher.schedulers.base import Intent, JobStatus, State, Ticket
from launcher.schedulers.commands import clean_environment
from launcher.schedulers.states import from_markers

# The log is named after the job, whose id the shell knows first: `exec` keeps it.
_START = 'exec >"$1$$.out" 2>&1; exec bash "$2" "$3"'


class LocalScheduler:
    """Runs jobs at once, as processes of their own session.

    Parameters
    ----------
    in_allocation
        Whether the jobs are to use the allocation of the `salloc` that the shell is in.
    """

    def __init__(self, in_allocation: bool = False) -> None:
        self._in_allocation = in_allocation

    def validate(self, script_text: str) -> str | None:
        """Nothing can refuse a job here, nor keep it waiting."""
        return None

    def ignored_environment(self) -> list[str]:
        """Nothing here is read from the shell's environment."""
        return []

    def submit(self, script: Path, tag: str) -> str:
        """Start a script in a session of its own, so that it outlives the launcher and its terminal."""
        script = script.resolve()
        with Path(os.devnull).open("r+b") as nothing:
            # Not Popen: it minds a child that nobody waits for.
            pid = os.posix_spawn(
                "/bin/bash",
                ["bash", "-c", _START, "bash", str(log_prefix_beside(script)), str(script), tag],
                dict(os.environ) if self._in_allocation else clean_environment(None),
                file_actions=[(os.POSIX_SPAWN_DUP2, nothing.fileno(), number) for number in range(3)],
                setsid=True,
            )
        return str(pid)

    def find(self, intent: Intent) -> str | None:
        """Look for a process that runs the script with the tag."""
        wanted = [os.fsencode(intent.script.resolve()), os.fsencode(intent.tag)]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _command(entry.name)[-2:] == wanted:
                return entry.name
        return None

    def statuses(self, tickets: Iterable[Ticket]) -> Mapping[str, JobStatus]:
        return {ticket.job_id: _status(ticket) for ticket in tickets}

    def cancel(self, job_id: str) -> None:
        try:
            os.killpg(int(job_id), signal.SIGTERM)
        except ProcessLookupError as error:
            raise UserError(f"job {job_id} is not running") from error


def _status(ticket: Ticket) -> JobStatus:
    marked = from_markers(ticket.launch_dir, ticket.job_id)
    if marked is not None and marked.state.is_final:
        return marked
    if _runs_script_of(ticket):
        return JobStatus(State.RUNNING, nodes=(marked and marked.nodes) or "localhost")
    # The mark may have been written between the two looks.
    marked = from_markers(ticket.launch_dir, ticket.job_id)
    if marked is not None and marked.state.is_final:
        return marked
    return JobStatus(State.FAILED, "the process is gone and left no mark: it was killed")


def _runs_script_of(ticket: Ticket) -> bool:
    """Whether the process is still the job's: pids are used again."""
    # Resolved: the run may be asked for through a link.
    directory = os.fsencode(ticket.launch_dir.resolve())
    for _ in range(100):
        command = _command(ticket.job_id)
        if command or not _is_alive(ticket.job_id):
            break
        time.sleep(0.005)  # in the middle of an exec a process has no arguments
    return any(directory in argument for argument in command)


def _command(pid: str) -> list[bytes]:
    """The argument vector of a process; empty where there is none."""
    try:
        return Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")[:-1]
    except (OSError, ValueError):
        return []


def _is_alive(pid: str) -> bool:
    """Whether there is such a process, and not only what is left of one until its parent looks."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except (OSError, ValueError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
