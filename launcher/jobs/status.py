"""Which launches of a run count now: those that wait or run, else the newest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.runs.paths import LAUNCHES, launch_numbers
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.tracking.launches import Launch, adopt, read_launch
from launcher.tracking.polling import poll
from supervisor.marks import chain_end, read_lives

# A job that waits to be requeued for longer than this is not looked for behind a newer launch of its run.
_REQUEUE_SECONDS = 14 * 86400.0


@dataclass(frozen=True, slots=True)
class Tracked:
    """A launch with what its scheduler says; `launch` is ``None`` where it could not be read.

    `unanswered` says why the scheduler could not be asked, if it could not.
    """

    run_dir: Path
    launch: Launch | None
    status: JobStatus
    unanswered: str | None = None


def look(run_dirs: Sequence[Path], only: Mapping[Path, Sequence[int]] | None = None) -> list[Tracked]:
    """Look at runs, in their order: of each all launches that are live, the newest first, or else the newest.

    However many runs there are, each scheduler is asked once. One broken run hides no other.

    Parameters
    ----------
    only
        Of these runs just the launches of these numbers, whatever became of them.
    """
    only = only or {}
    return [
        item
        for run_dir, tracked in look_closely(run_dirs, only).items()
        for item in (tracked if run_dir in only else _chosen(tracked))
    ]


def look_closely(
    run_dirs: Sequence[Path], only: Mapping[Path, Sequence[int]] | None = None
) -> dict[Path, list[Tracked]]:
    """All launches of each run that may live, the newest first, and the newest in any case.

    `only` is as in `look`.
    """
    only = only or {}
    read = {
        run_dir: _read(run_dir, only[run_dir]) if run_dir in only else _candidates(run_dir)
        for run_dir in run_dirs
    }
    opened = adopt([item for found in read.values() for item in found if isinstance(item, Launch)])
    answers = dict(zip((launch.paths.directory for launch in opened), poll(opened), strict=True))
    launches = {launch.paths.directory: launch for launch in opened}
    by_run: dict[Path, list[Tracked]] = {}
    for run_dir, found in read.items():
        tracked = by_run[run_dir] = []
        for item in found:
            if isinstance(item, Launch):
                directory = item.paths.directory
                told = answers[directory]
                tracked.append(Tracked(run_dir, launches[directory], told.status, told.unanswered))
            else:
                tracked.append(Tracked(run_dir, None, JobStatus(State.UNKNOWN, item.message)))
    return by_run


def _candidates(run_dir: Path) -> list[Launch | UserError]:
    """The newest launch that can be read, and older ones that may be live; newest first."""
    found: list[Launch | UserError] = []
    try:
        numbers = launch_numbers(run_dir)
    except OSError as error:
        return [UserError(f"its launches cannot be read: {(error.strerror or str(error)).lower()}")]
    for number in reversed(numbers):
        directory = run_dir / LAUNCHES / str(number)
        if any(isinstance(item, Launch) and not item.manifest.error for item in found) and _is_over(
            directory
        ):
            continue
        found += _read(run_dir, [number])
    return found


def _read(run_dir: Path, numbers: Sequence[int]) -> list[Launch | UserError]:
    found: list[Launch | UserError] = []
    for number in numbers:
        try:
            found.append(read_launch(run_dir, number))
        except UserError as error:
            found.append(error)
    return found


def _is_over(launch_dir: Path) -> bool:
    """Whether the marks alone tell that a job is over: one that failed may wait to be requeued."""
    lives = read_lives(launch_dir)
    if not lives or lives[-1].task is not None:
        return False
    last = lives[-1]
    if last.is_over and chain_end(launch_dir) is not None:
        return True
    return last.exit_code == 0 or (last.is_over and time.time() - (last.ended or 0.0) > _REQUEUE_SECONDS)


def _chosen(tracked: Sequence[Tracked]) -> list[Tracked]:
    alive = [item for item in tracked if item.status.state.is_live]
    if alive:
        return alive
    read = [item for item in tracked if item.launch]
    became = [item for item in read if item.status.state is not State.NOT_SUBMITTED]
    newest = next(iter(became or read or tracked), None)
    return [newest] if newest else []
