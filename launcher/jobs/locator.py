"""The places of runs: trees of this call, trees seen before, and trees of jobs that schedulers know.

A tree is a directory with runs. Walks are bounded, and skip unreadable directories.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from launcher.errors import UserError, escape
from launcher.jobs.launches import Launch, readable_launches
from launcher.runs.known_trees import forget_trees, remember_trees, remembered_trees
from launcher.runs.paths import LAUNCHES, launch_dir_of, submitted_tag
from launcher.schedulers.base import Scheduler
from launcher.slurm.commands import Retry, SchedulerSilent

T = TypeVar("T")

RESULTS_VARIABLE = "SLIPWAY_RESULTS_DIR"
_SECONDS = 10.0  # for Slurm to answer

_DEPTH = 4  # levels of directories below a tree in which a run may lie
# A directory with more entries holds data, and no runs.
_MAX_ENTRIES = 20_000
_MAX_DIRECTORIES = 20_000  # of one walk: a tree may be the top of a file system


class RunLocator:
    """The runs that this call can find.

    The trees in `always` are always searched: the base first, then ``$SLIPWAY_RESULTS_DIR``. `remarks` are
    answers of schedulers that lead to no run: why they could not be asked, or that a job's script is in none.
    """

    def __init__(self, base: Path) -> None:
        paths = os.environ.get(RESULTS_VARIABLE, "").split(":")
        self.always = _drop_duplicates([base, *(Path(path).expanduser() for path in paths if path)])
        self.remarks: list[str] = []
        # Walks and readings are slow on a file server.
        self._walk = cache(lambda trees: list(runs_below(trees)))
        self._read = cache(readable_launches)

    @cached_property
    def trees(self) -> list[Path]:
        """Return all trees, those of this call first; forget those that are gone."""
        remembered = remembered_trees()
        gone = [tree for tree in remembered if _is_gone(tree)]
        forget_trees(gone)
        return _drop_duplicates([*self.always, *(tree for tree in remembered if tree not in gone)])

    def launches(self, trees: Iterable[Path] | None = None, job_id: str | None = None) -> list[Launch]:
        """Return all launches in some trees (default: all trees), or those that may be of a job.

        Remember the directories of their runs.
        """
        run_dirs = self._walk(tuple(self.trees if trees is None else trees))
        launches = [launch for run_dir in run_dirs for launch in self._read(run_dir, job_id)]
        remember_trees({launch.paths.run_dir.parent for launch in launches})
        return launches

    def locate(self, job_id: str) -> list[Launch]:
        """Return the launch that a scheduler says a job is of; raise UserError if the launch was removed."""
        removed: Path | None = None
        for script in self._ask(lambda scheduler: scheduler.locate(job_id)):
            if script is None:
                continue
            if launch := self._launch_of(script):
                return [launch]
            if _run_of(script):
                removed = script
            else:
                self.remarks.append(f"there is a job {job_id} of {escape(str(script))}, which is in no run")
        if removed is not None:
            message = f"job {job_id} is of a launch that was removed: {escape(str(removed))}"
            raise UserError(message, hint=f"to end it: scancel {job_id}")
        return []

    def trees_of_jobs(self) -> list[Path]:
        """Return the trees of this user's jobs in the schedulers, without those that are known already."""
        scripts = [script for some in self._ask(lambda scheduler: scheduler.scripts()) for script in some]
        trees = [run_dir.parent for script in scripts if (run_dir := _run_of(script)) is not None]
        return [tree for tree in _drop_duplicates(trees) if tree not in self.trees]

    def _launch_of(self, script: Path) -> Launch | None:
        run_dir, number = _run_of(script), launch_dir_of(script).name
        # A run may have been removed, and launched again, while the job of the earlier launch waits.
        tag = submitted_tag(script)
        launches = self._read(run_dir) if run_dir is not None else []
        same = (launch for launch in launches if str(launch.paths.number) == number)
        return next((launch for launch in same if tag in (None, launch.manifest.tag)), None)

    @cached_property
    def _schedulers(self) -> list[Scheduler]:
        # Imported late: a list of runs asks no scheduler.
        from launcher.schedulers.local import LocalScheduler
        from launcher.schedulers.slurm import SlurmScheduler

        retry = Retry(last_start=0, answer_timeout=_SECONDS)
        return [LocalScheduler(), SlurmScheduler(os.environ.get("SLURM_CONF"), retry)]

    def _ask(self, question: Callable[[Scheduler], T]) -> Iterator[T]:
        """Yield the answers of the schedulers of this machine and this shell; a silent one is asked once."""
        for scheduler in list(self._schedulers):
            try:
                answer = question(scheduler)
            except SchedulerSilent as error:
                self._schedulers.remove(scheduler)
                self.remarks.append(error.message.splitlines()[0])
            except (UserError, OSError):  # a machine without Slurm is worth no remark
                continue
            else:
                yield answer


def originals(launches: Sequence[Launch]) -> list[Launch]:
    """Return launches without copies: a tag in several places is one launch.

    It is where its manifest is the user's own, then where the run has its own name, then the older one.
    """

    def rank(launch: Launch) -> tuple[bool, bool, float]:
        with contextlib.suppress(OSError):
            status = launch.paths.manifest.lstat()
            is_renamed = launch.paths.run_dir.name != launch.manifest.run
            return status.st_uid != os.geteuid(), is_renamed, status.st_ctime
        return True, True, 0.0

    best: dict[str, Launch] = {}
    for launch in sorted(launches, key=rank):
        best.setdefault(launch.manifest.tag, launch)
    return [launch for launch in launches if best[launch.manifest.tag] is launch]


def _run_of(script: Path) -> Path | None:
    """Return the run that a script belongs to, by its path."""
    launch_dir = launch_dir_of(script.absolute())
    inside = launch_dir.parent.name == LAUNCHES and launch_dir.name.isdigit()
    return launch_dir.parents[1] if inside and is_run(launch_dir.parents[1]) else None


def _is_gone(tree: Path) -> bool:
    # Only if that is certain: a file system that does not answer may come back.
    try:
        return not stat.S_ISDIR(tree.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _drop_duplicates(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(path.absolute() for path in paths))


def is_run(directory: Path) -> bool:
    """Return True if a directory is that of a run; False if it may not be read."""
    try:
        return (directory / LAUNCHES).is_dir()
    except OSError:
        return False


def runs_below(trees: Iterable[Path]) -> Iterator[Path]:
    """Yield the directories of the runs below some trees, each once, those nearer to the top first.

    Run directories and hidden ones are not walked. Links are followed, but not in circles: a directory met
    by its own name is not yielded again through a link.
    """
    seen: set[tuple[int, int]] = set()
    waiting = deque((tree, 0) for tree in trees)
    for _ in range(_MAX_DIRECTORIES):
        if not waiting:
            return
        directory, depth = waiting.popleft()
        try:
            status = directory.stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        if is_run(directory):
            yield directory
        elif depth < _DEPTH:
            waiting.extend((path, depth + 1) for path in _directories(directory))


def _directories(directory: Path) -> list[Path]:
    """Return the directories that may be or hold runs, links last; of a scan that fails, those before."""
    names: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= _MAX_ENTRIES:
                return []
            with contextlib.suppress(OSError):  # one that may not be looked at hides no other
                if not entry.name.startswith(".") and entry.is_dir():
                    names.append((entry.is_symlink(), entry.name))
    return [directory / name for _, name in sorted(names)]
