"""The jobs that this process submitted: whatever fails afterwards, its exit code must not deny them."""

from __future__ import annotations

from pathlib import Path

# By the job's id the directory that has it on record.
_directories: dict[str, Path] = {}


def note_submitted(job_id: str, directory: Path) -> None:
    """Remember a job that the scheduler has taken."""
    _directories[job_id] = directory


def note_ended(job_id: str) -> None:
    """Forget a job that was waited for: it is no longer there."""
    _directories.pop(job_id, None)


def submitted_jobs() -> dict[str, Path]:
    """Return the directories with the records of the jobs that may still be there, the oldest job first."""
    return dict(_directories)


def forget_jobs() -> None:
    """Begin anew: several command lines may run in one process."""
    _directories.clear()
