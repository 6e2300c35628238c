"""All that is known of runs: in the trees of this call, in trees seen before, and of one's own jobs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UserError, one_line
from launcher.runs.index import Entry, Index
from launcher.runs.paths import LAUNCHES, launch_dir_of
from launcher.tracking.scanning import entries_of, is_run, runs_below

if TYPE_CHECKING:
    from launcher.schedulers.base import Scheduler

RESULTS_VARIABLE = "SLIPWAY_RESULTS_DIR"
_MOST_CLUSTERS = 4  # that are asked for a job: a user has few, throw-away ones leave many


class Known:
    """What this call can know of runs.

    Attributes
    ----------
    always
        The trees that are looked at whatever is remembered: the base first, then ``$SLIPWAY_RESULTS_DIR``.
    silent
        What schedulers told that helps nobody to a run: that they could not be asked and why, or that they
        have the job of a script whose run is gone, or never was one.
    """

    def __init__(self, base: Path) -> None:
        given = os.environ.get(RESULTS_VARIABLE, "").split(":")
        self.always = _unique([base, *(Path(path).expanduser() for path in given if path)])
        self.index = Index()
        self.silent: list[str] = []
        self._entries: dict[Path, list[Entry]] = {}
        self._all: list[Entry] | None = None

    @cached_property
    def trees(self) -> list[Path]:
        """All trees, those of this call first; what is no longer there is forgotten."""
        remembered = self.index.trees()
        gone = [tree for tree in remembered if _is_gone(tree)]
        self.index.forget(trees=gone)
        return _unique([*self.always, *(tree for tree in remembered if tree not in gone)])

    def launches(self, trees: Iterable[Path] | None = None) -> list[Entry]:
        """All launches in some trees, by default in all: these are remembered, what is gone is forgotten."""
        if trees is None and self._all is not None:
            return self._all  # the walk is what costs, on a slow file server
        found = [
            entry
            for run_dir in runs_below(self.trees if trees is None else trees)
            for entry in self._read(run_dir)
        ]
        self.index.remember(found)
        if trees is None:
            self._all = found
            unseen = {entry.run_dir for entry in self.index.entries()} - {entry.run_dir for entry in found}
            self.index.forget(run_dirs=[run_dir for run_dir in unseen if _is_gone(run_dir)])
        return found

    def _read(self, run_dir: Path) -> list[Entry]:
        if run_dir not in self._entries:
            self._entries[run_dir] = entries_of(run_dir)
        return self._entries[run_dir]

    def still_there(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries of the index that hold; the others are dropped from it."""
        held: list[Entry] = []
        gone: list[Entry] = []
        for entry in entries:
            (held if entry.is_there else gone).append(entry)
        run_dirs = {entry.run_dir for entry in gone}
        self.index.forget(run_dirs, {run.parent for run in run_dirs if _is_gone(run.parent)})
        return held

    def originals(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries without copies: a tag that is in several places is one launch, where it was seen first."""
        known = self.index.with_tags([entry.tag for entry in entries])
        by_tag: dict[str, Entry] = {}
        for entry in entries:
            first = known.get(entry.tag)
            if entry.tag not in by_tag or (first is not None and first.run_dir == entry.run_dir):
                by_tag[entry.tag] = entry
        return list(by_tag.values())

    def located(self, job_id: str) -> list[Entry]:
        """The launch whose script a scheduler says the job has: also of a job that a colleague submitted."""
        for scheduler in self._schedulers():
            try:
                script = scheduler.locate(job_id)
            except UserError as error:
                self._could_not(error)
                continue
            entry = _launch_of(script) if script is not None else None
            if entry is not None:
                self.index.remember([entry])
                return [entry]
            if script is not None:
                self.silent.append(f"there is a job {job_id}, of {one_line(str(script))}, which is in no run")
        return []

    def trees_of_jobs(self) -> list[Path]:
        """The trees of the jobs that schedulers know as this user's, without those that are known already."""
        found: list[Path] = []
        for scheduler in self._schedulers():
            try:
                scripts = scheduler.scripts()
            except UserError as error:
                self._could_not(error)
                continue
            found += [run_dir.parent for script in scripts if (run_dir := _run_of(script)) is not None]
        return [tree for tree in _unique(found) if tree not in self.trees]

    def _schedulers(self) -> Iterator[Scheduler]:
        # Imported late: most look-ups need none.
        from launcher.schedulers.registry import scheduler_for

        yield scheduler_for("local", None)
        remembered = [entry for entry in reversed(self.index.entries()) if entry.scheduler == "slurm"]
        there = [entry for entry in remembered if _has_configuration(entry)]
        seen = [entry.usable_slurm_conf for entry in there]
        for conf in list(dict.fromkeys([os.environ.get("SLURM_CONF"), *seen]))[:_MOST_CLUSTERS]:
            yield scheduler_for("slurm", conf)

    def _could_not(self, error: UserError) -> None:
        from launcher.schedulers.commands import Silent

        told = error.message.splitlines()[0]
        # That there is no Slurm here is no news to anybody.
        if isinstance(error, Silent) and told not in self.silent:
            self.silent.append(told)


def _has_configuration(entry: Entry) -> bool:
    try:
        return entry.slurm_conf is None or Path(entry.slurm_conf).exists()
    except (OSError, ValueError):
        return False


def _run_of(script: Path) -> Path | None:
    """The run that a script is of, by where it lies."""
    launch_dir = launch_dir_of(script.absolute())
    inside = launch_dir.parent.name == LAUNCHES and launch_dir.name.isdigit()
    return launch_dir.parents[1] if inside and is_run(launch_dir.parents[1]) else None


def _launch_of(script: Path) -> Entry | None:
    run_dir = _run_of(script)
    entries = entries_of(run_dir) if run_dir is not None else []
    return next((entry for entry in entries if str(entry.number) == launch_dir_of(script).name), None)


def _is_gone(tree: Path) -> bool:
    # Only where that is certain: a file system that does not answer comes back.
    try:
        return not stat.S_ISDIR(tree.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _unique(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(path.absolute() for path in paths))
