"""What this process did to jobs: whatever fails afterwards, its exit code must not deny it."""

from __future__ import annotations

from pathlib import Path

# By the job's id the directory that has it on record.
_directories: dict[str, Path] = {}
# By what was done, such as ``cancelled {}``, the jobs that it was done to.
_acts: dict[str, list[str]] = {}


def note_submitted(job_id: str, directory: Path) -> None:
    """Remember a job that the scheduler has taken."""
    _directories[job_id] = directory


def note_ended(job_id: str) -> None:
    """Forget a job that was waited for: it is no longer there."""
    _directories.pop(job_id, None)


def submitted_jobs() -> dict[str, Path]:
    """Return the directories with the records of the jobs that may still be there, the oldest job first."""
    return dict(_directories)


def note_act(what: str, job_id: str) -> None:
    """Remember what was done to a job that was there before; `what` has a ``{}`` in place of the job."""
    _acts.setdefault(what, []).append(job_id)


def acts() -> dict[str, list[str]]:
    """Return the jobs that something was done to, by what it was."""
    return {what: list(job_ids) for what, job_ids in _acts.items()}


def forget_jobs() -> None:
    """Begin anew: several command lines may run in one process."""
    _directories.clear()
    _acts.clear()
