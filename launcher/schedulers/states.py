"""Slurm's words for a job, and the marks a job leaves itself, as one `JobStatus`.

Pure functions over text that was already asked for. The text comes from these commands, in an environment
without the user's own ``SQUEUE_*`` and ``SACCT_*``::

    squeue --noheader --states=all --Format=<SQUEUE_FORMAT> --jobs=…
    sacct --noheader --parsable2 --allocations --format=<SACCT_FORMAT> --jobs=…
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from launcher.runs.paths import EXIT_MARKER
from launcher.schedulers.base import JobStatus, State, Ticket

# For --Format, not --format: only the long form has the exit code. A field with a suffix and no width is
# neither padded nor cut.
SQUEUE_FORMAT = "JobArrayID:|,State:|,Reason:|,NodeList:|,TimeUsed:|,exit_code:|"
SACCT_FORMAT = "JobID,State,ExitCode,Reason,NodeList,Elapsed"

# A job's id and the command line that it was submitted with: squeue's own, and that of sbatch.
COMMAND_FORMAT = "JobArrayID:|,Command:|"
SUBMIT_LINE_FORMAT = "JobID,SubmitLine"

STARTED_MARKER = "started.json"

SLURM_STATES: Mapping[str, State] = {
    "BOOT_FAIL": State.NODE_FAIL,
    "CANCELLED": State.CANCELLED,
    "COMPLETED": State.COMPLETED,
    "COMPLETING": State.COMPLETING,
    "CONFIGURING": State.PENDING,
    "DEADLINE": State.DEADLINE,
    "FAILED": State.FAILED,
    "NODE_FAIL": State.NODE_FAIL,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
    "PENDING": State.PENDING,
    "PREEMPTED": State.PREEMPTED,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "RESIZING": State.RUNNING,
    "RESV_DEL_HOLD": State.PENDING,
    "REVOKED": State.CANCELLED,
    "RUNNING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "SPECIAL_EXIT": State.FAILED,
    "STAGE_OUT": State.COMPLETING,
    "STOPPED": State.SUSPENDED,
    "SUSPENDED": State.SUSPENDED,
    "TIMEOUT": State.TIMEOUT,
}

# What our trainer exits with when it was asked to stop and has saved: EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75
INTERRUPTED_REASON = "saved before its end: launching again continues"

_NOTHING = {"", "None", "(null)", "N/A", "None assigned", "Unknown", "INVALID"}


def parse_squeue(text: str) -> dict[str, JobStatus]:
    """Read squeue's answer in `SQUEUE_FORMAT`; the keys are job ids, ``9_2`` for a task of an array."""
    found = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) >= 6 and parts[0]:
            job_id, state, reason, nodes, elapsed, code = parts[:6]
            found[job_id] = _status(state, reason, nodes, elapsed, _wait_status(code))
    return found


def parse_sacct(text: str) -> dict[str, JobStatus]:
    """Read sacct's answer in `SACCT_FORMAT`. The steps of a job (``12.batch``) are passed over."""
    found = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) >= 6 and parts[0] and "." not in parts[0]:
            job_id, state, code, reason, nodes, elapsed = parts[:6]
            # sacct's reason is why the job once waited; it says nothing about how the job ended.
            waits = state.startswith(("PENDING", "REQUEUED"))
            found[job_id] = _status(state, reason if waits else "", nodes, elapsed, _exit_and_signal(code))
    return found


def job_with_argument(text: str, argument: str) -> str | None:
    """The id of the job whose command line ends with an argument.

    `text` is squeue's answer in `COMMAND_FORMAT` or sacct's in `SUBMIT_LINE_FORMAT`.
    """
    for line in text.splitlines():
        job_id, _, command = line.strip().partition("|")
        if command.removesuffix("|").endswith(f" {argument}"):
            return job_id.strip()
    return None


def from_markers(launch_dir: Path, job_id: str | None = None) -> JobStatus | None:
    """What the job itself left in its launch directory; ``None`` where it left nothing.

    A job that began and recorded no end is UNKNOWN: it may run, and it may have been killed.

    Parameters
    ----------
    job_id
        Marks of another job are passed over.
    """
    started = _marker(launch_dir / STARTED_MARKER, job_id)
    ended = _marker(launch_dir / EXIT_MARKER, job_id)
    began = _number(started, "started")
    nodes = str(started["nodes"]) if started.get("nodes") else None
    # A requeued job starts again beside the exit mark of its first life.
    if ended and not (began and began > (_number(ended, "ended") or began)):
        return _ended(ended, began, nodes)
    if started:
        return JobStatus(State.UNKNOWN, "it started, and recorded no end", nodes)
    return None


def started_job(launch_dir: Path) -> str | None:
    """The id of the job that began in a launch directory, as its own mark tells it."""
    job_id = _marker(launch_dir / STARTED_MARKER, None).get("job_id")
    return str(job_id) if job_id else None


def resolve(ticket: Ticket, live: JobStatus | None, accounted: JobStatus | None) -> JobStatus:
    """Decide between the queue, the accounting and the job's own marks.

    The queue is believed while it says that the job waits or runs; then the accounting, then the queue's
    memory of jobs that ended lately (``MinJobAge``), then the marks. What nobody can tell is UNKNOWN.

    Parameters
    ----------
    live
        What squeue said of the job; ``None`` if it was not asked or does not know the job.
    accounted
        The same of sacct.
    """
    if live and not live.state.is_final and live.state is not State.UNKNOWN:
        return live
    marked = from_markers(ticket.launch_dir, ticket.job_id)
    for told in (accounted, live, marked):
        if told and told.state.is_final:
            return _filled(told, live, marked)
    if accounted and accounted.state is not State.UNKNOWN:
        # Slurm leaves "runaway" jobs behind that the accounting believes alive for ever.
        word = accounted.state.value
        return replace(accounted, state=State.UNKNOWN, reason=f"accounted {word}, but not in the queue")
    return marked or live or JobStatus(State.UNKNOWN, "the scheduler does not know this job")


def _filled(status: JobStatus, *others: JobStatus | None) -> JobStatus:
    """Fill what one source does not tell from the others, unless they tell of another ending."""
    for other in others:
        if other and other.state is status.state:
            missing = {f.name for f in fields(JobStatus) if getattr(status, f.name) is None}
            status = replace(status, **{name: getattr(other, name) for name in missing})
    return status


def _status(word: str, reason: str, nodes: str, elapsed: str, code: int | None) -> JobStatus:
    name = word.split()[0].rstrip("+") if word else ""
    state = SLURM_STATES.get(name, State.UNKNOWN)
    if state is State.UNKNOWN:
        return JobStatus(state, f"Slurm says {word!r}", _told(nodes), _told(elapsed))
    if not state.is_final:
        code = None
    elif code == 0 and not state.is_good:
        code = None  # Slurm has no exit code for a job that it ended itself, and prints a zero
    state = _interrupted_if_saved(state, code)
    return JobStatus(state, _reason(state, word, reason, code), _told(nodes), _clock(elapsed), code)


def _reason(state: State, word: str, reason: str, code: int | None) -> str | None:
    if state is State.CANCELLED:
        # What the queue still shows is why the job waited before it was cancelled.
        return word.partition(" ")[2] or None
    if state is State.PENDING and word in ("CONFIGURING", "REQUEUE_HOLD"):
        return word
    if state is State.INTERRUPTED:
        return INTERRUPTED_REASON
    if state is State.FAILED and code and reason in _NOTHING | {"NonZeroExitCode"}:
        return exit_reason(code)
    return _told(reason)


def _interrupted_if_saved(state: State, code: int | None) -> State:
    return State.INTERRUPTED if state is State.FAILED and code == EXIT_INTERRUPTED else state


def exit_reason(code: int) -> str:
    """Say an exit code in words: ``exit code 137 (SIGKILL)``."""
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _told(text: str) -> str | None:
    return None if text in _NOTHING else text


def _wait_status(text: str) -> int | None:
    """Turn squeue's raw wait status into what a shell would show: 768 is 3, 9 is 137."""
    if not text.isdigit():
        return None
    status = int(text)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8


def _exit_and_signal(text: str) -> int | None:
    """Turn ``exit:signal`` into what a shell would show."""
    code, _, number = text.partition(":")
    if not (code.isdigit() and number.isdigit()):
        return None
    return 128 + int(number) if int(number) else int(code)


def _clock(text: str) -> str | None:
    """Bring ``[D-][[HH:]MM:]SS`` to ``[D-]HH:MM:SS``."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or len(parts) > 3:
        return None
    padded = [part.zfill(2) for part in ["0"] * (3 - len(parts)) + parts]
    return f"{days}{dash}{':'.join(padded)}"


def _marker(path: Path, job_id: str | None) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or (job_id and str(content.get("job_id", job_id)) != job_id):
        return {}
    return content


def _number(content: Mapping[str, Any], key: str) -> float | None:
    value = content.get(key)
    return float(value) if isinstance(value, int | float) else None


def _ended(marker: Mapping[str, Any], began: float | None, nodes: str | None) -> JobStatus:
    code = _number(marker, "exit_code")
    if code is None:
        return JobStatus(State.UNKNOWN, f"{EXIT_MARKER} holds no exit code", nodes)
    ended = _number(marker, "ended")
    elapsed = None
    if began is not None and ended is not None:
        days, seconds = divmod(int(ended - began), 86400)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        elapsed = f"{days}-{clock}" if days else clock
    state = _interrupted_if_saved(State.FAILED if code else State.COMPLETED, int(code))
    reason = exit_reason(int(code)) if state is State.FAILED else None
    return JobStatus(state, _reason(state, "", reason or "", int(code)), nodes, elapsed, int(code))
