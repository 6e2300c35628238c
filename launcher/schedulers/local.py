"""This machine without Slurm: the script is a background process, and its pid the job's id."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.paths import log_beside
from launcher.schedulers.base import JobStatus, State, Ticket
from launcher.schedulers.commands import clean_environment
from launcher.schedulers.states import from_markers

_PENDING_LOG = ".log"


class LocalScheduler:
    """Runs jobs at once, as processes of their own session."""

    def validate(self, script_text: str) -> str | None:
        """Nothing can refuse a job here, nor keep it waiting."""
        return None

    def submit(self, script: Path) -> str:
        """Start a script in a session of its own, so that it outlives the launcher and its terminal."""
        log = script.parent / _PENDING_LOG
        with log.open("wb") as stream, Path(os.devnull).open("rb") as nothing:
            # Not Popen: it minds a child that nobody waits for.
            pid = os.posix_spawn(
                "/bin/bash",
                ["bash", str(script.resolve())],
                clean_environment(None),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, stream.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, stream.fileno(), 2),
                ],
                setsid=True,
            )
        # The log is named after the job, whose id is known only now; the process keeps its open file.
        log.rename(log_beside(script, str(pid)))
        return str(pid)

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
        return JobStatus(State.RUNNING, nodes="localhost")
    # The mark may have been written between the two looks.
    marked = from_markers(ticket.launch_dir, ticket.job_id)
    if marked is not None and marked.state.is_final:
        return marked
    return JobStatus(State.FAILED, "the process is gone and left no mark: it was killed")


def _runs_script_of(ticket: Ticket) -> bool:
    """Whether the process is still the job's: pids are used again."""
    try:
        command = Path(f"/proc/{int(ticket.job_id)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    # Resolved: the run may be asked for through a link.
    return os.fsencode(str(ticket.launch_dir.resolve())) in command
