"""The places of runs: trees of this call, trees seen before, and trees of jobs that schedulers know.

A tree is a directory with runs. Walks are bounded, and skip unreadable directories.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from launcher.errors import UserError, escape
from launcher.runs.index import Entry, Index, entry_of
from launcher.runs.manifest import find_manifest
from launcher.runs.paths import LAUNCHES, launch_dir_of, launch_numbers, submitted_tag
from launcher.schedulers.base import Scheduler
from launcher.slurm.commands import Retry, SchedulerSilent
from slipway.common.node.marks import job_of

T = TypeVar("T")

RESULTS_VARIABLE = "SLIPWAY_RESULTS_DIR"
_MAX_CLUSTERS = 4  # to ask for a job: a user has few, but throw-away clusters leave many
# The time limits of the cluster of this shell, and of those that are remembered.
_OWN_SECONDS, _SECONDS = 10.0, 5.0
# A remembered cluster that was silent is not asked again for this long.
_REST_SECONDS = 600.0

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
        self.always = _unique([base, *(Path(path).expanduser() for path in paths if path)])
        self.index = Index()
        self.remarks: list[str] = []
        self._read = cache(entries_of)
        self._all: list[Entry] | None = None

    @cached_property
    def trees(self) -> list[Path]:
        """Return all trees, those of this call first; forget those that are gone."""
        remembered = self.index.trees()
        gone = [tree for tree in remembered if _is_gone(tree)]
        self.index.forget(trees=gone)
        return _unique([*self.always, *(tree for tree in remembered if tree not in gone)])

    def launches(self, trees: Iterable[Path] | None = None) -> list[Entry]:
        """Return all launches in some trees (default: all trees); remember them, and forget what is gone."""
        if trees is None and self._all is not None:
            return self._all  # the walk is slow on a file server
        entries = [
            entry
            for run_dir in runs_below(self.trees if trees is None else trees)
            for entry in self._read(run_dir)
        ]
        self.index.remember(entries)
        if trees is None:
            self._all = entries
            unseen = {entry.run_dir for entry in self.index.entries()} - {entry.run_dir for entry in entries}
            self.index.forget(run_dirs=[run_dir for run_dir in unseen if _is_gone(run_dir)])
        return entries

    def still_there(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries of the index that are still valid; drop the others from it."""
        valid: list[Entry] = []
        gone: list[Entry] = []
        for entry in entries:
            (valid if entry.is_there else gone).append(entry)
        run_dirs = {entry.run_dir for entry in gone}
        self.index.forget(run_dirs, {run.parent for run in run_dirs if _is_gone(run.parent)})
        return valid

    def originals(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return entries without copies: a tag in several places is one launch.

        It is where its manifest is the user's own, and else where it was seen first.
        """

        def rank(entry: Entry) -> tuple[bool, bool]:
            first = self.index.with_tag(entry.tag)
            return entry.is_own, first is not None and first.run_dir == entry.run_dir

        best: dict[str, Entry] = {}
        for entry in sorted(entries, key=rank, reverse=True):
            best.setdefault(entry.tag, entry)
        return [entry for entry in entries if best[entry.tag] is entry]

    def located(self, job_id: str) -> list[Entry]:
        """Return the launch that a scheduler says a job is of; raise UserError if the launch was removed."""
        removed: Path | None = None
        for script in self._ask_all(lambda scheduler: scheduler.locate(job_id)):
            entry = _launch_of(script) if script is not None else None
            if entry is not None:
                self.index.remember([entry])
                return [entry]
            if script is not None and _run_of(script):
                removed = script
            elif script is not None:
                self.remarks.append(f"there is a job {job_id} of {escape(str(script))}, which is in no run")
        if removed is not None:
            message = f"job {job_id} is of a launch that was removed: {escape(str(removed))}"
            raise UserError(message, hint=f"to end it: scancel {job_id}")
        return []

    def trees_of_jobs(self) -> list[Path]:
        """Return the trees of this user's jobs in the schedulers, without those that are known already."""
        scripts = [script for some in self._ask_all(lambda scheduler: scheduler.scripts()) for script in some]
        trees = [run_dir.parent for script in scripts if (run_dir := _run_of(script)) is not None]
        return [tree for tree in _unique(trees) if tree not in self.trees]

    def _ask_all(self, question: Callable[[Scheduler], T]) -> Iterator[T]:
        """Ask all schedulers at once, except silent ones; yield the answers in their order."""
        clusters = list(self._clusters)
        answers: list[T | UserError] = [
            SchedulerSilent(f"Slurm does not answer: nothing within {cluster.seconds:.0f} s")
            for cluster in clusters
        ]

        def ask(number: int) -> None:
            try:
                answers[number] = question(clusters[number].scheduler)
            except UserError as error:
                answers[number] = error
            except OSError as error:  # a file that may not be read is no silence
                answers[number] = UserError(str(error))

        # Daemons: a command that cannot be killed keeps nobody waiting.
        threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(len(clusters))]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for number, (cluster, thread) in enumerate(zip(clusters, threads, strict=True)):
            thread.join(max(0.0, start + cluster.seconds - time.monotonic()))
            answer = answers[number]
            if isinstance(answer, UserError):
                self._note_failure(cluster, answer)
                continue
            if cluster.slurm_conf and cluster.slurm_conf in self._silent_clusters:
                self.index.note_silence(cluster.slurm_conf, None)
            yield answer

    @cached_property
    def _clusters(self) -> list[_Cluster]:
        # Imported late: a list of runs asks no scheduler.
        from launcher.schedulers.local import LocalScheduler
        from launcher.schedulers.slurm import SlurmScheduler

        def slurm(conf: str | None, seconds: float) -> _Cluster:
            retry = Retry(last_start=0, answer_timeout=seconds)
            return _Cluster(conf, SlurmScheduler(conf, retry), seconds)

        own = os.environ.get("SLURM_CONF")
        remembered = [entry for entry in reversed(self.index.entries()) if entry.scheduler == "slurm"]
        present = [entry for entry in remembered if os.access(entry.slurm_conf or "/", os.F_OK)]
        confs = dict.fromkeys(entry.usable_slurm_conf for entry in present)
        others = [conf for conf in confs if conf is not None and conf != own][: _MAX_CLUSTERS - 1]
        clusters = [_Cluster("", LocalScheduler(), _SECONDS), slurm(own, _OWN_SECONDS)]
        for conf in others:
            since = self._silent_clusters.get(conf)
            if since is None:
                clusters.append(slurm(conf, _SECONDS))
                continue
            at = time.strftime("%H:%M", time.localtime(since))
            remark = f"SLURM_CONF={escape(conf)} did not answer at {at}, and was not asked again"
            self.remarks.append(f"{remark}; to ask it: export SLURM_CONF={escape(shlex.quote(conf))}")
        return clusters

    @cached_property
    def _silent_clusters(self) -> dict[str, float]:
        return self.index.silent_since(time.time() - _REST_SECONDS)

    def _note_failure(self, cluster: _Cluster, error: UserError) -> None:
        # A machine without Slurm is worth no remark.
        if not isinstance(error, SchedulerSilent):
            return
        self._clusters.remove(cluster)  # which is not asked again
        if cluster.slurm_conf:
            self.index.note_silence(cluster.slurm_conf, time.time())
        where = f"SLURM_CONF={escape(cluster.slurm_conf)}: " if cluster.slurm_conf else ""
        self.remarks.append(where + error.message.splitlines()[0])


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A scheduler to ask for a job within some seconds; without Slurm its `slurm_conf` is empty."""

    slurm_conf: str | None
    scheduler: Scheduler
    seconds: float


def _run_of(script: Path) -> Path | None:
    """Return the run that a script belongs to, by its path."""
    launch_dir = launch_dir_of(script.absolute())
    inside = launch_dir.parent.name == LAUNCHES and launch_dir.name.isdigit()
    return launch_dir.parents[1] if inside and is_run(launch_dir.parents[1]) else None


def _launch_of(script: Path) -> Entry | None:
    run_dir = _run_of(script)
    entries = entries_of(run_dir) if run_dir is not None else []
    # A run may have been removed, and launched again, while the job of the earlier launch waits.
    tag = submitted_tag(script)
    number = launch_dir_of(script).name
    return next(
        (entry for entry in entries if str(entry.number) == number and tag in (None, entry.tag)), None
    )


def _is_gone(tree: Path) -> bool:
    # Only if that is certain: a file system that does not answer may come back.
    try:
        return not stat.S_ISDIR(tree.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _unique(paths: Iterable[Path]) -> list[Path]:
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


def entries_of(run_dir: Path, newest: int | None = None) -> list[Entry]:
    """Return the launches of a run, or its `newest`, by their manifests, oldest first; skip broken ones."""
    try:
        numbers = launch_numbers(run_dir)
    except OSError:
        return []
    entries = []
    for number in numbers if newest is None else numbers[-newest:]:
        directory = run_dir / LAUNCHES / str(number)
        try:
            manifest = find_manifest(directory)
        except UserError:
            continue
        claimed = job_of(directory) if manifest.job_id is None else None
        job_id = manifest.id_in(claimed) if claimed else manifest.job_id
        entries.append(entry_of(run_dir, number, manifest, job_id))
    return entries


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
