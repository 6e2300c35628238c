"""The jobs that this process submitted or changed: a later failure must not hide them."""

from __future__ import annotations

from pathlib import Path

# The directory with the record of each job, by its id.
_directories: dict[str, Path] = {}
# The jobs by the action, such as ``cancelled {}``.
_acts: dict[str, list[str]] = {}


def note_submitted(job_id: str, directory: Path) -> None:
    """Remember a job that the scheduler has accepted."""
    _directories[job_id] = directory


def note_ended(job_id: str) -> None:
    """Forget a job that has ended."""
    _directories.pop(job_id, None)


def submitted_jobs() -> dict[str, Path]:
    """Return the directories with the records of the jobs that may still exist, the oldest job first."""
    return dict(_directories)


def note_act(action: str, job_id: str) -> None:
    """Remember an action on an existing job; `action` has a ``{}`` in place of the job."""
    _acts.setdefault(action, []).append(job_id)


def acts() -> dict[str, list[str]]:
    """Return the jobs by the actions on them."""
    return {action: list(job_ids) for action, job_ids in _acts.items()}


def forget_jobs() -> None:
    """Forget everything: several command lines may run in one process."""
    _directories.clear()
    _acts.clear()
