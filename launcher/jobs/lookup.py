"""Find a run by the user's word for it: its name, a path in it, or the id of one of its jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import UserError, escape, file_mode, nearest
from launcher.jobs.locator import RunLocator, entries_of, is_run, runs_below
from launcher.runs import provenance
from launcher.runs.index import Entry
from launcher.runs.paths import LAUNCHES, display_path, find_runs, launch_numbers
from slipway.common.node.marks import later_jobs

_JOB = re.compile(r"(\d+)(?:_(\d+))?", re.ASCII)
_MAX_NAMED = 12  # in a message


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run, and the part of it that the user's word names: a launch, or an array's task (``17_2``)."""

    run_dir: Path
    launch: int | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()
    job: str | None = field(default=None, compare=False)


def find_run(word: str, base_results_dir: Path) -> RunRef:
    """Find a run, from any directory; raise UserError if there is none, or several of that name.

    A word is a path, else a name below the base, else a job's id, else a name in any known tree.
    """
    if not word:
        raise UserError("'' names no run")
    locator = RunLocator(base_results_dir)
    ref = _by_path(word)
    if ref is None and stat.S_ISDIR(file_mode(base_results_dir / word / LAUNCHES)):
        ref = RunRef((base_results_dir / word).absolute())
    ref = ref or _by_job(word, locator) or _by_name(word, locator)
    if ref is None:
        raise _not_found(word, locator)
    locator.index.remember(entries_of(ref.run_dir, newest=1))
    notes = (locator.index.trouble,) if locator.index.trouble else ()
    return replace(ref, notes=(*ref.notes, *notes))


def runs_in(base_results_dir: Path) -> list[Path]:
    """Return the directories of the runs below a directory, the last launched first."""
    run_dirs = find_runs(base_results_dir.absolute())
    if run_dirs:
        RunLocator(base_results_dir).index.remember([], {run_dir.parent for run_dir in run_dirs})
    return run_dirs


def _by_path(word: str) -> RunRef | None:
    path = Path(word)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    real = Path(os.path.realpath(path))  # not resolve(), which fails on links that go in circles
    path = real if ".." in path.parts else path.absolute()
    if stat.S_ISDIR(file_mode(path / LAUNCHES)):
        return RunRef(path)
    # The path as the user wrote it; else where its links lead.
    for start in (path, real):
        for run_dir in start.parents:
            if is_run(run_dir) and launch_numbers(run_dir):
                return RunRef(run_dir, _number(path, run_dir))
    return None


def _number(path: Path, run_dir: Path) -> int | None:
    """Return the launch that a path in a run belongs to: the names at the top are links into one."""
    launches, target = (run_dir / LAUNCHES).resolve(), path.resolve()
    if not target.is_relative_to(launches) or target == launches:
        return None
    name = target.relative_to(launches).parts[0]
    return int(name) if name.isdecimal() else None


def _by_job(word: str, locator: RunLocator) -> RunRef | None:
    match = _JOB.fullmatch(word)
    if match is None or _below(word, locator.always):
        return None
    job_id, task = match[1], match[2]
    # A point of a sweep is recorded by its whole id, a task of another array by the array's.
    point = _recorded(word, locator) if task else []
    entries = point or _launches_of(job_id, locator)
    if task and not point:
        entries = [entry for entry in entries if not _is_point(entry, job_id)]
    if not entries and task:
        point = entries = _with_job(word, locator.launches())
    task = None if point else task
    if not entries:
        return None
    # Ids are reused, and every cluster has its own.
    *older, newest = sorted(locator.originals(entries), key=lambda entry: entry.created)
    if _is_point(newest, job_id):  # the array of a sweep: its other points are no alternatives
        array = newest.run_dir.parent
        older = [entry for entry in older if not (_is_point(entry, job_id) and entry.run_dir.parent == array)]
    others = ", ".join(f"{display_path(entry.run_dir)} ({entry.created})" for entry in reversed(older))
    note = f"several launches had a job {job_id}; the newest is taken, not that of {others}"
    return RunRef(newest.run_dir, newest.number, task, (note,) if older else (), job_id)


def _recorded(job_id: str, locator: RunLocator) -> list[Entry]:
    """Return the launches that had a job of this id, without a question to a scheduler."""
    known = locator.still_there(locator.index.with_job(job_id))
    if any(entry.is_own for entry in known):
        return known
    return _with_job(job_id, locator.launches(locator.always)) or known


def _launches_of(job_id: str, locator: RunLocator) -> Sequence[Entry]:
    """Return the launches that had a job of this id.

    A launch of somebody else may be a copy of the user's own: the scheduler knows where that is.
    """
    recorded = _recorded(job_id, locator)
    if any(entry.is_own for entry in recorded):
        return recorded
    with contextlib.suppress(UserError) if recorded else contextlib.nullcontext():
        recorded = locator.located(job_id) or recorded
    return (
        recorded
        or _with_job(job_id, locator.launches())
        or _with_job(job_id, locator.launches(locator.trees_of_jobs()))
    )


def _with_job(job_id: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return the launches that became this job, have it as a link, or are points of this array."""
    return [
        entry
        for entry in entries
        if entry.job_id == job_id
        or _is_point(entry, job_id)
        or job_id in later_jobs(entry.run_dir / LAUNCHES / str(entry.number), (entry.tag,)).values()
    ]


def _is_point(entry: Entry, array: str) -> bool:
    """Return True if a launch is a point of a sweep with this array id."""
    return entry.job_id is not None and entry.job_id.startswith(f"{array}_")


def _by_name(word: str, locator: RunLocator) -> RunRef | None:
    for tree in locator.always:
        run_dirs = _below(word, [tree]) or [run for run in runs_below([tree]) if run.name == word]
        if run_dirs:
            return RunRef(_chosen(word, run_dirs, locator))
    remembered = locator.still_there(entry for entry in locator.index.entries() if entry.run == word)
    run_dirs = (
        _named(word, remembered, _below(word, locator.trees))
        or _named(word, locator.launches())
        or _named(word, locator.launches(locator.trees_of_jobs()))
    )
    return RunRef(_chosen(word, run_dirs, locator)) if run_dirs else None


def _below(word: str, trees: Iterable[Path]) -> list[Path]:
    return [tree / word for tree in trees if is_run(tree / word)]


def _named(word: str, entries: Sequence[Entry], run_dirs: Iterable[Path] = ()) -> list[Path]:
    """Return runs whose directory has the name, or else that were launched under it."""
    by_directory = {*run_dirs, *(entry.run_dir for entry in entries if entry.run_dir.name == word)}
    return sorted(by_directory or {entry.run_dir for entry in entries if entry.run == word})


def _chosen(word: str, run_dirs: Sequence[Path], locator: RunLocator) -> Path:
    """Choose one of several runs of a name: no copy, and rather the user's own."""
    launches = {run_dir: entries for run_dir in run_dirs if (entries := entries_of(run_dir))}
    if len(run_dirs) == 1 or not launches:
        return run_dirs[0]
    # A copy begins with the same launch, however it continued.
    originals = locator.originals([entries[0] for entries in launches.values()])
    left = [launches[entry.run_dir][-1] for entry in originals]
    left = [entry for entry in left if entry.is_own] or left
    me = provenance.user()
    left = [entry for entry in left if entry.user == me] or left
    if len(left) == 1:
        return left[0].run_dir
    choices = "\n".join(
        escape(f"{display_path(entry.run_dir)}  ({entry.user}, {entry.created})") for entry in left
    )
    raise UserError(
        f"there are several runs {escape(repr(word))}; name the one you mean by its directory", hint=choices
    )


def _not_found(word: str, locator: RunLocator) -> UserError:
    entries = locator.launches()
    names = sorted({entry.run for entry in entries} | {entry.run_dir.name for entry in entries})
    if _JOB.fullmatch(word):
        what = f"there is no run {word!r}, and no launch of a job of that id is known"
    else:
        what = f"there is no run {escape(repr(word))}: neither a path in one nor a name that is known"
    trees = [escape(shlex.quote(display_path(tree))) for tree in locator.trees]
    looked = f"looked in {', '.join(trees[:_MAX_NAMED])}"
    more = f" and {len(trees) - _MAX_NAMED} more" if len(trees) > _MAX_NAMED else ""
    hints = [
        _spelling(word, names),
        looked + more,
        *_holds_runs(word),
        *locator.remarks,
        locator.index.trouble,
    ]
    return UserError(what, hint="\n".join(hint for hint in hints if hint))


def _spelling(word: str, names: Sequence[str]) -> str:
    near = nearest(word, names)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return f"runs: {', '.join(map(escape, names[:_MAX_NAMED])) or 'none'}{more}"


def _holds_runs(word: str) -> list[str]:
    if not Path(word).is_dir() or next(runs_below([Path(word)]), None) is None:
        return []
    return [f"there are runs below it: slipway status --base-results-dir {shlex.quote(word)}"]
