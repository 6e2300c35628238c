"""Finding a run by what the user calls it: its name, a path in it, or the id of one of its jobs."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.errors import UserError, file_mode, nearest, one_line
from launcher.runs import provenance
from launcher.runs.index import Entry
from launcher.runs.paths import LAUNCHES, find_runs, launch_numbers, short
from launcher.tracking.known import Known
from launcher.tracking.scanning import entries_of, is_run, runs_below
from supervisor.marks import later_jobs

_JOB = re.compile(r"(\d+)(?:_(\d+))?", re.ASCII)
_MOST_NAMED = 12  # in a message


@dataclass(frozen=True, slots=True)
class Found:
    """A run, and what of it the word named.

    Attributes
    ----------
    launch
        The number of one of its launches, where the word names that.
    task
        The number of a task, where the word is that of an array's (``17_2``).
    job
        The id of a job, where the word is that; of a sweep's array `run_dir` is one of its points.
    notes
        What the user should be told: that the word could have meant something else, too.
    """

    run_dir: Path
    launch: int | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()
    job: str | None = field(default=None, compare=False)


def find(word: str, base_results_dir: Path) -> Found:
    """Find a run, from any directory.

    A word is taken for a path, else for a name below the base, else for a job's id, else for a name in any
    tree that is known.

    Raises
    ------
    UserError
        If there is none, or several of that name.
    """
    if not word:
        raise UserError("'' names no run")
    known = Known(base_results_dir)
    found = _by_path(word) or _directly_below(word, base_results_dir) or _by_job(word, known)
    found = found or _by_name(word, known)
    if found is None:
        raise _nowhere(word, known)
    known.index.remember(entries_of(found.run_dir, newest=1))
    notes = (known.index.trouble,) if known.index.trouble else ()
    return replace(found, notes=(*found.notes, *notes))


def runs_in(base_results_dir: Path) -> list[Path]:
    """The directories of the runs below a directory, those launched last coming first."""
    found = find_runs(base_results_dir.absolute())
    if found:
        Known(base_results_dir).index.remember([], {run_dir.parent for run_dir in found})
    return found


def _by_path(word: str) -> Found | None:
    path = Path(word)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    real = Path(os.path.realpath(path))  # not resolve(), which fails on links that go in circles
    path = real if ".." in path.parts else path.absolute()
    if stat.S_ISDIR(file_mode(path / LAUNCHES)):
        return Found(path)
    # By the way the user came; else, through a link, by where it leads.
    for start in (path, real):
        for run_dir in start.parents:
            if is_run(run_dir) and launch_numbers(run_dir):
                return Found(run_dir, _number(path, run_dir))
    return None


def _number(path: Path, run_dir: Path) -> int | None:
    """The launch that something in a run belongs to: the names at the top are links into one."""
    launches, there = (run_dir / LAUNCHES).resolve(), path.resolve()
    if not there.is_relative_to(launches) or there == launches:
        return None
    name = there.relative_to(launches).parts[0]
    return int(name) if name.isdigit() else None


def _directly_below(word: str, tree: Path) -> Found | None:
    run_dir = tree / word
    return Found(run_dir.absolute()) if stat.S_ISDIR(file_mode(run_dir / LAUNCHES)) else None


def _by_job(word: str, known: Known) -> Found | None:
    matched = _JOB.fullmatch(word)
    if matched is None or _below(word, known.always):
        return None
    job_id, task = matched[1], matched[2]
    # A point of a sweep is known by its whole id, a task of another array by the array's.
    point = _points(word, known) if task else []
    entries = point or _launches_of(job_id, known)
    if task and not point:
        entries = [entry for entry in entries if not _is_point(entry, job_id)]
    if not entries and task:
        point = entries = _with_job(word, known.launches())
    task = None if point else task
    if not entries:
        return None
    # Ids are used again, and every cluster counts its own.
    *older, newest = sorted(known.originals(entries), key=lambda entry: entry.created)
    if _is_point(newest, job_id):  # the array of a sweep: the others of it are not meant instead
        array = newest.run_dir.parent
        older = [entry for entry in older if not (_is_point(entry, job_id) and entry.run_dir.parent == array)]
    others = ", ".join(f"{short(entry.run_dir)} ({entry.created})" for entry in reversed(older))
    note = f"several launches had a job {job_id}; the newest is taken, not that of {others}"
    return Found(newest.run_dir, newest.number, task, (note,) if older else (), job_id)


def _points(word: str, known: Known) -> list[Entry]:
    return known.still_there(known.index.with_job(word)) or _with_job(word, known.launches(known.always))


def _launches_of(job_id: str, known: Known) -> Sequence[Entry]:
    """The launches that had a job of this id."""
    return (
        known.still_there(known.index.with_job(job_id))
        or _with_job(job_id, known.launches(known.always))
        or known.located(job_id)
        or _with_job(job_id, known.launches())
        or _with_job(job_id, known.launches(known.trees_of_jobs()))
    )


def _with_job(job_id: str, entries: Iterable[Entry]) -> list[Entry]:
    """Those that became this job, whose chain has it as a link, or that are points of this array."""
    return [
        entry
        for entry in entries
        if entry.job_id == job_id or _is_point(entry, job_id) or job_id in _later_jobs(entry)
    ]


def _is_point(entry: Entry, array: str) -> bool:
    """Whether a launch is a point of a sweep, and this the id of its array."""
    return entry.job_id is not None and entry.job_id.startswith(f"{array}_")


def _later_jobs(entry: Entry) -> Collection[str]:
    return later_jobs(entry.run_dir / LAUNCHES / str(entry.number), (entry.tag,)).values()


def _by_name(word: str, known: Known) -> Found | None:
    for tree in known.always:
        run_dirs = _below(word, [tree]) or [run for run in runs_below([tree]) if run.name == word]
        if run_dirs:
            return Found(_chosen(word, run_dirs, known))
    remembered = known.still_there(known.index.with_name(word))
    run_dirs = (
        _named(word, remembered, _below(word, known.trees))
        or _named(word, known.launches())
        or _named(word, known.launches(known.trees_of_jobs()))
    )
    return Found(_chosen(word, run_dirs, known)) if run_dirs else None


def _below(word: str, trees: Iterable[Path]) -> list[Path]:
    return [tree / word for tree in trees if is_run(tree / word)]


def _named(word: str, entries: Sequence[Entry], run_dirs: Iterable[Path] = ()) -> list[Path]:
    """Runs whose directory has the name, or else that were launched under it."""
    by_directory = {*run_dirs, *(entry.run_dir for entry in entries if entry.run_dir.name == word)}
    return sorted(by_directory or {entry.run_dir for entry in entries if entry.run == word})


def _chosen(word: str, run_dirs: Sequence[Path], known: Known) -> Path:
    """One of several runs of a name: not a copy, and one's own."""
    launches = {run_dir: found for run_dir in run_dirs if (found := entries_of(run_dir))}
    if len(run_dirs) == 1 or not launches:
        return run_dirs[0]
    # A copy begins with the same launch, however it went on.
    originals = known.originals([found[0] for found in launches.values()])
    left = [launches[entry.run_dir][-1] for entry in originals]
    me = provenance.user()
    left = [entry for entry in left if entry.user == me] or left
    if len(left) == 1:
        return left[0].run_dir
    told = "\n".join(one_line(f"{short(entry.run_dir)}  ({entry.user}, {entry.created})") for entry in left)
    raise UserError(
        f"there are several runs {one_line(repr(word))}; name the one you mean by its directory", hint=told
    )


def _nowhere(word: str, known: Known) -> UserError:
    entries = known.launches()
    names = sorted({entry.run for entry in entries} | {entry.run_dir.name for entry in entries})
    if _JOB.fullmatch(word):
        what = f"there is no run {word!r}, and no launch of a job of that id is known"
    else:
        what = f"there is no run {one_line(repr(word))}: neither a path in one nor a name that is known"
    trees = [one_line(shlex.quote(short(tree))) for tree in known.trees]
    looked = f"looked in {', '.join(trees[:_MOST_NAMED])}"
    more = f" and {len(trees) - _MOST_NAMED} more" if len(trees) > _MOST_NAMED else ""
    hints = [_spelling(word, names), looked + more, *_holds_runs(word), *known.silent, known.index.trouble]
    return UserError(what, hint="\n".join(hint for hint in hints if hint))


def _spelling(word: str, names: Sequence[str]) -> str:
    near = nearest(word, names)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f"runs: {', '.join(map(one_line, names[:_MOST_NAMED])) or 'none'}{more}"


def _holds_runs(word: str) -> list[str]:
    if not Path(word).is_dir() or next(runs_below([Path(word)]), None) is None:
        return []
    return [f"there are runs below it: slipway status --base-results-dir {shlex.quote(word)}"]
