"""Which files are the log of a launch: the job's, those of tasks or links, and those of single ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.jobs.launches import Launch
from supervisor.files import read_json, unix_time, whole

FAILURES = "failures"
_FAILURE_BYTES = 1 << 20


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
        if number.isdecimal() and number.isascii():
            found[int(number)] = path
    return dict(sorted(found.items()))


def task_log(launch: Launch, task: int, extension: str = "out") -> Path:
    """The log of one task of an array; it need not exist yet."""
    path = launch.log(extension)
    return path.with_name(f"{path.stem}_{task}{path.suffix}")


def link_log(launch: Launch, job_id: str, extension: str = "out") -> Path:
    """The log of one link of a chain; it need not exist yet."""
    return launch.paths.directory / launch.paths.log_name(job_id, extension)


def job_logs(launch: Launch, extension: str = "out") -> list[Path]:
    """The logs that there are: the job's, those of an array's tasks, or those of a chain's links in order."""
    logs = [link_log(launch, job_id, extension) for job_id in launch.jobs]
    return [log for log in [*logs, *task_logs(launch, extension).values()] if log.is_file()]


def newest_log(launch: Launch, extension: str = "out") -> Path:
    """The job's log, of an array that of the task with the highest number, of a chain that of the last link.

    It need not exist yet.

    Raises
    ------
    UserError
        If the launch never became a job.
    """
    path = launch.log(extension)
    if launch.is_chain:
        return (job_logs(launch, extension) or [path])[-1]
    if path.is_file():
        return path
    tasks = task_logs(launch, extension)
    return tasks[max(tasks)] if tasks else path


def next_log(launch: Launch, now: Path, extension: str = "out") -> Path:
    """The log of the link or the task after the one that is read now, once there is one; until then that."""
    logs = job_logs(launch, extension)
    after = logs[logs.index(now) + 1 :] if now in logs else logs
    return after[0] if after else now


def rank_logs(launch: Launch, rank: int) -> list[Path]:
    """The logs that one rank's process wrote itself, the newest first.

    NeMo's rank 0 moves what it finds at its start to ``run_0/``, ``run_1/``, ..., at times the log of a rank
    that began before it.
    """
    name = f"nemo_log_globalrank-{rank}_*.txt"
    moved = launch.paths.results.glob(f"run_*/{name}")
    by_time = sorted(moved, key=modified, reverse=True)
    return [*sorted(launch.paths.results.glob(name)), *by_time]


def modified(path: Path) -> float:
    """When a file was last written, in Unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def began(launch: Launch) -> float:
    """When the newest life of a job, or its newest link, began, in Unix seconds; 0 of one that had just one.

    Errors before it are no longer true.
    """
    lives = launch.attempts
    return (lives[-1].started or 0.0) if len(lives) > 1 else 0.0


def rank_failures(launch: Launch) -> list[RankFailure]:
    """What ranks left that failed since the job last began, the first to fail coming first."""
    found = []
    since = began(launch)
    for path in (launch.paths.results / FAILURES).glob("globalrank-*.json"):
        try:
            told = read_json(path, _FAILURE_BYTES)
        except (OSError, ValueError):
            continue
        time, rank = unix_time(told.get("time")), whole(told.get("rank"), 0)
        if time is not None and time >= since and rank is not None and "error" in told:
            found.append(RankFailure(time, rank, str(told["error"]), path))
    return sorted(found, key=lambda failure: failure.time)
