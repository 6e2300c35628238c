"""Run jobs without a queue: the script is a background process, and its pid the job's id."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.paths import SCRIPT_SUFFIX, SUPERVISOR, log_prefix_beside, scripts_in
from launcher.runs.provenance import host
from launcher.schedulers.base import Acceptance, FoundJobs, JobRef, JobStatus, Submission
from launcher.schedulers.job_status import mark_cancelled, read_log_reason, read_marks
from launcher.slurm.environment import clean_environment
from launcher.slurm.notations import format_time_limit
from launcher.slurm.states import Action, State
from slipway.common.files import open_regular, read_json
from slipway.common.node import settings

# The index of the tag in a supervisor's command.
_TAG = 3
# The most characters of the name that the holder of a run's lock writes.
_SAID = 200

# The log is named after the job's id, which the shell knows first, and which `exec` keeps.
_START = 'exec >"$1$$.out" 2>&1; exec bash "$2" "$3"'


class LocalScheduler:
    """A scheduler that runs jobs at once, each in a new session on a host, by default this one.

    With `in_allocation` they use the allocation of the shell's `salloc`.
    """

    def __init__(self, in_allocation: bool = False, host: str = "") -> None:
        self._in_allocation = in_allocation
        self._host = host

    def validate(self, script_text: str) -> Acceptance:
        """Accept every job: without a queue it is neither refused nor held."""
        return Acceptance()

    def ignored_environment(self) -> dict[str, str]:
        """Return no variables: the shell's environment sets no options."""
        return {}

    def submit(self, submission: Submission) -> str:
        """Start a script in a new session, so that it outlives the launcher and its terminal."""
        is_plain = submission.link == 1 and submission.after is None and submission.exclude is None
        assert is_plain, "a dependency needs a queue"
        script = submission.script.resolve()
        with Path(os.devnull).open("r+b") as null:
            # Not Popen, which warns of a child that is not waited for.
            pid = os.posix_spawn(
                "/bin/bash",
                ["bash", "-c", _START, "bash", str(log_prefix_beside(script)), str(script), submission.tag],
                dict(os.environ) if self._in_allocation else clean_environment(None),
                file_actions=[(os.POSIX_SPAWN_DUP2, null.fileno(), number) for number in range(3)],
                setsid=True,
            )
        return str(pid)

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        """Find the processes that run the scripts with their tags."""
        requested = {(submission.script.resolve().parent, submission.tag) for submission in submissions}
        pids_of: dict[str, list[str]] = {}
        for pid in _pids():
            job = _job(_command(pid))
            # Subshells of a script have its arguments; they lead no session.
            if job in requested and _stat(pid)[3:4] == [pid]:
                pids_of.setdefault(job[1], []).append(pid)
        return {tag: {1: sorted(pids, key=_start)} for tag, pids in pids_of.items()}

    def locate(self, job_id: str) -> Path | None:
        """Return the script of a job that still runs on this machine."""
        return _script(job_id)

    def scripts(self) -> Sequence[Path]:
        """Return the scripts of the jobs that run on this machine, of any user."""
        return [script for pid in _pids() if (script := _script(pid)) is not None]

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Look at the processes of this host; of a job of another host, only at its marks."""
        return [_status(ref) for ref in refs]

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        """Act on one job after the other: signals cost nothing."""
        errors: dict[str, UserError] = {}
        for job_id in job_ids:
            try:
                self._require_running(job_id)
                _act(action, job_id)
            except UserError as error:
                errors[job_id] = error
        return errors

    def _require_running(self, job_id: str) -> None:
        if self._host not in ("", host()):
            raise UserError(f"job {job_id} runs on {self._host}, without Slurm: do this there")
        # The number may be that of another process now.
        if _script(job_id) is None:
            raise UserError(f"job {job_id} is over already: there is no such process on {host()}")


def _act(action: Action, job_id: str) -> None:
    """Signal all processes of a job to end, or only its script to save."""
    if action in (Action.HOLD, Action.RELEASE):
        raise UserError("hold and release need Slurm")
    try:
        if action is Action.CANCEL:
            os.killpg(int(job_id), signal.SIGTERM)
        else:
            os.kill(int(job_id), signal.SIGUSR1)
    except ProcessLookupError as error:
        raise UserError(f"job {job_id} is over already") from error
    except PermissionError as error:
        owner = _owner(job_id)
        hint = f"the job is {owner}'s: {owner} can, or an administrator"
        raise UserError(f"job {job_id}: permission denied", hint=hint) from error


def _status(ref: JobRef) -> JobStatus:
    marked = read_marks(ref, ref.job_id)
    if marked is not None and marked.state.is_final:
        return mark_cancelled(marked, ref)
    if ref.host not in ("", host()):
        return JobStatus(State.UNKNOWN, f"it runs on {ref.host}, without Slurm: ask there")
    if _runs_script_of(ref):
        holder = turn_holder(ref.launch_dir.parents[1]) if marked is None else None
        if holder is not None and holder.split()[1:2] != [ref.job_id]:
            return JobStatus(State.PENDING, f"it waits for the end of {holder}")
        nodes = (marked and marked.nodes) or "localhost"
        return JobStatus(State.RUNNING, nodes=nodes, elapsed=_elapsed(ref.job_id))
    # The mark may be newer than the process.
    marked = read_marks(ref, ref.job_id)
    if marked is None or not marked.state.is_final:
        why = read_log_reason(ref) or "it was killed"
        marked = JobStatus(State.FAILED, f"the process is gone and left no mark: {why}")
    return mark_cancelled(marked, ref)


def turn_holder(run_dir: Path) -> str | None:
    """Return the job that the next one of a run waits for, as ``job 17 (launch 2)``."""
    try:
        with open_regular(run_dir / settings.TURN) as lock:
            holder = os.fsdecode(lock.read(_SAID))
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    except OSError:
        pass
    return None


def _script(pid: str) -> Path | None:
    """Return the script of ours that a process runs, or has become the supervisor of."""
    command = _command(pid)
    for argument in reversed(command[-2:]):
        if argument.endswith(SCRIPT_SUFFIX.encode()):
            return Path(os.fsdecode(argument))
    directory = _find_supervised(command)
    return None if directory is None else next(iter(scripts_in(directory)), None)


def _job(command: list[bytes]) -> tuple[Path, str] | None:
    """Return a job's launch directory and tag from its command; ``None`` if it was started by hand."""
    directory = _find_supervised(command)
    if directory is not None:
        tag, argument = (os.fsdecode(word) for word in command[_TAG : _TAG + 2])
        return (directory, tag) if tag == argument else None
    if len(command) < 2 or not command[-2].endswith(SCRIPT_SUFFIX.encode()):
        return None
    return _resolve(command[-2]).parent, os.fsdecode(command[-1])


def _resolve(argument: bytes) -> Path:
    """Resolve a path's links; a foreign process may name one with a cycle."""
    return Path(os.path.realpath(os.fsdecode(argument)))


def _find_supervised(command: list[bytes]) -> Path | None:
    """Return the launch directory of a supervisor: ``python3 -IS DIR/supervisor.pyz TAG ... --``.

    The supervisor of a job of Slurm's, which may run on this machine as well, does not count.
    """
    if len(command) <= _TAG + 1 or not command[_TAG - 1].endswith(b"/" + SUPERVISOR.encode()):
        return None
    directory = _resolve(command[_TAG - 1]).parent
    try:
        is_of_slurm = read_json(directory / settings.NAME).get("scheduler") == settings.SLURM
    except (OSError, ValueError):
        is_of_slurm = False
    return None if is_of_slurm else directory


def _pids() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _owner(pid: str) -> str:
    try:
        return Path(f"/proc/{int(pid)}").owner()
    except (OSError, KeyError, ValueError):
        return "another user"


def _runs_script_of(ref: JobRef) -> bool:
    """Return True if the process is still the job's: pids are reused."""
    # Resolved: the run may be named through a link.
    directory = ref.launch_dir.resolve()
    for _ in range(100):
        command = _command(ref.job_id)
        if command or not is_alive(ref.job_id):
            break
        time.sleep(0.005)  # during an exec a process has no arguments
    return _find_supervised(command) == directory or any(
        os.fsencode(directory) + b"/" in argument for argument in command
    )


def _command(pid: str) -> list[bytes]:
    """Return the argument vector of a process; empty without a process."""
    try:
        return Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")[:-1]
    except (OSError, ValueError):
        return []


def is_alive(pid: str) -> bool:
    """Return True if the process exists, and is no zombie."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _start(pid: str) -> int:
    """Return the start of a process, in ticks of the system's clock."""
    return int((_stat(pid)[19:20] or ["0"])[0])


def _elapsed(pid: str) -> str | None:
    """Return the run time of a process; ``None`` if it is gone."""
    start, running = _start(pid), time.clock_gettime(time.CLOCK_BOOTTIME)
    return format_time_limit(max(int(running - start / os.sysconf("SC_CLK_TCK")), 0)) if start else None


def _stat(pid: str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command's name; empty if there is no process."""
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_bytes()
    except (OSError, ValueError):
        return []
    return stat.rpartition(b")")[2].decode().split()
