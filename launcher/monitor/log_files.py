"""Which files are the log of a launch: the job's, those of an array's tasks, and those of single ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launcher.tracking.launches import Launch

FAILURES = "failures"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank left when it failed: why, and the file that says so."""

    time: float
    rank: int
    error: str
    path: Path


def task_logs(launch: Launch, extension: str = "out") -> dict[int, Path]:
    """The logs of an array's tasks that there are, by their numbers, ascending; empty for any other job."""
    if launch.manifest.job_id is None:
        return {}
    prefix = f"{launch.paths.log_prefix}{launch.manifest.job_id}_"
    found = {}
    for path in launch.paths.directory.glob(f"log-*_*_*.{extension}"):
        number = path.name.removeprefix(prefix).removesuffix(f".{extension}")
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def task_log(launch: Launch, task: int, extension: str = "out") -> Path:
    """The log of one task of an array; it need not exist yet."""
    path = launch.log(extension)
    return path.with_name(f"{path.stem}_{task}{path.suffix}")


def newest_log(launch: Launch, extension: str = "out") -> Path:
    """The job's log, or of an array that of the task with the highest number; it need not exist yet.

    Raises
    ------
    UserError
        If the launch never became a job.
    """
    path = launch.log(extension)
    if path.exists():
        return path
    tasks = task_logs(launch, extension)
    return tasks[max(tasks)] if tasks else path


def rank_logs(launch: Launch, rank: int) -> list[Path]:
    """The logs that one rank's process wrote itself, the newest first.

    NeMo's rank 0 moves what it finds at its start to ``run_0/``, ``run_1/``, ..., at times the log of a rank
    that began before it.
    """
    name = f"nemo_log_globalrank-{rank}_*.txt"
    moved = launch.paths.results.glob(f"run_*/{name}")
    by_time = sorted(moved, key=lambda path: path.stat().st_mtime, reverse=True)
    return [*sorted(launch.paths.results.glob(name)), *by_time]


def rank_failures(launch: Launch) -> list[RankFailure]:
    """What ranks left that failed, the first to fail coming first."""
    found = []
    for path in (launch.paths.results / FAILURES).glob("globalrank-*.json"):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            found.append(RankFailure(float(told["time"]), int(told["rank"]), str(told["error"]), path))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda failure: failure.time)
