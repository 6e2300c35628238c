"""All that is known of runs: in the trees of this call, in trees seen before, and of one's own jobs."""

from __future__ import annotations

import os
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import UserError, one_line
from launcher.runs.index import Entry, Index
from launcher.runs.paths import LAUNCHES, launch_dir_of, submitted_tag
from launcher.tracking.scanning import entries_of, is_run, runs_below

if TYPE_CHECKING:
    from launcher.schedulers.base import Scheduler

T = TypeVar("T")

RESULTS_VARIABLE = "SLIPWAY_RESULTS_DIR"
_MOST_CLUSTERS = 4  # that are asked for a job: a user has few, throw-away ones leave many
# For how long they are waited for: the one that this shell is of, and those that are remembered.
_OWN_SECONDS, _SECONDS = 10.0, 5.0
# One that is remembered, and was silent, is not asked again for so long.
_REST_SECONDS = 600.0


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
        self._gone: set[str | None] = set()
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
        """Return the launch whose script a scheduler says the job has, whoever submitted it.

        Raises
        ------
        UserError
            If its launch was removed, and another has the directory now: no other job of that id is meant.
        """
        removed: Path | None = None
        for script in self._ask_all(lambda scheduler: scheduler.locate(job_id)):
            entry = _launch_of(script) if script is not None else None
            if entry is not None:
                self.index.remember([entry])
                return [entry]
            if script is not None and _run_of(script):
                removed = script
            elif script is not None:
                self.silent.append(f"there is a job {job_id}, of {one_line(str(script))}, which is in no run")
        if removed is not None:
            told = f"job {job_id} is of a launch that was removed: {one_line(str(removed))}"
            raise UserError(told, hint=f"to end it: scancel {job_id}")
        return []

    def trees_of_jobs(self) -> list[Path]:
        """The trees of the jobs that schedulers know as this user's, without those that are known already."""
        scripts = [script for some in self._ask_all(lambda scheduler: scheduler.scripts()) for script in some]
        found = [run_dir.parent for script in scripts if (run_dir := _run_of(script)) is not None]
        return [tree for tree in _unique(found) if tree not in self.trees]

    def _ask_all(self, question: Callable[[Scheduler], T]) -> Iterator[T]:
        """Ask all schedulers at once, and none that was silent before; yield the answers in their order."""
        asked = [one for one in self._clusters if one.slurm_conf not in self._gone]
        answers: list[T | UserError] = [_silence(one) for one in asked]

        def ask(number: int) -> None:
            try:
                answers[number] = question(asked[number].scheduler)
            except UserError as error:
                answers[number] = error

        # Daemons: a command that cannot be ended keeps nobody waiting.
        threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(asked))]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for number, (one, thread) in enumerate(zip(asked, threads, strict=True)):
            thread.join(max(0.0, start + one.patience - time.monotonic()))
            answer = answers[number]
            if isinstance(answer, UserError):
                self._could_not(one, answer)
            else:
                self._heard(one)
                yield answer

    @cached_property
    def _clusters(self) -> list[_Cluster]:
        # Imported late: most look-ups need none.
        from launcher.schedulers.local import LocalScheduler
        from launcher.schedulers.slurm import SlurmScheduler
        from launcher.slurm.commands import Retry

        def slurm(conf: str | None, seconds: float) -> _Cluster:
            patience = Retry(last_start=0, answer_timeout=seconds)
            return _Cluster(conf, SlurmScheduler(conf, patience), seconds)

        own = os.environ.get("SLURM_CONF")
        remembered = [entry for entry in reversed(self.index.entries()) if entry.scheduler == "slurm"]
        there = [entry for entry in remembered if _has_configuration(entry)]
        confs = dict.fromkeys(entry.usable_slurm_conf for entry in there)
        others = [conf for conf in confs if conf is not None and conf != own][: _MOST_CLUSTERS - 1]
        return [
            _Cluster("", LocalScheduler(), _SECONDS),
            slurm(own, _OWN_SECONDS),
            *(slurm(conf, _SECONDS) for conf in others if not self._is_at_rest(conf)),
        ]

    def _is_at_rest(self, slurm_conf: str) -> bool:
        """Tell whether a cluster was silent a moment ago, and say that it is not asked."""
        since = self._silent_clusters.get(slurm_conf)
        if since is None:
            return False
        at = time.strftime("%H:%M", time.localtime(since))
        told = f"SLURM_CONF={one_line(slurm_conf)} did not answer at {at}, and was not asked again"
        self.silent.append(f"{told}; to ask it: export SLURM_CONF={one_line(shlex.quote(slurm_conf))}")
        return True

    @cached_property
    def _silent_clusters(self) -> dict[str, float]:
        return self.index.silent_since(time.time() - _REST_SECONDS)

    def _heard(self, one: _Cluster) -> None:
        if one.slurm_conf and one.slurm_conf in self._silent_clusters:
            self.index.note_silence(one.slurm_conf, None)

    def _could_not(self, one: _Cluster, error: UserError) -> None:
        from launcher.slurm.commands import SchedulerSilent

        # That there is no Slurm here is no news to anybody.
        if not isinstance(error, SchedulerSilent):
            return
        self._gone.add(one.slurm_conf)
        if one.slurm_conf:
            self.index.note_silence(one.slurm_conf, time.time())
        where = f"SLURM_CONF={one_line(one.slurm_conf)}: " if one.slurm_conf else ""
        self.silent.append(where + error.message.splitlines()[0])


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A scheduler that can be asked for a job, and for how many seconds it is waited for.

    `slurm_conf` is that of a Slurm, ``None`` of the machine's own; of this machine without Slurm it is empty.
    """

    slurm_conf: str | None
    scheduler: Scheduler
    patience: float


def _silence(one: _Cluster) -> UserError:
    from launcher.slurm.commands import SchedulerSilent

    return SchedulerSilent(f"Slurm does not answer: nothing within {one.patience:.0f} s")


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
    # A run may have been removed, and launched anew, while the job of the earlier launch waits.
    tag = submitted_tag(script)
    number = launch_dir_of(script).name
    return next((one for one in entries if str(one.number) == number and tag in (None, one.tag)), None)


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
