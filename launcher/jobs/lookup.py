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
from launcher.jobs.launches import Launch, readable_launches
from launcher.jobs.locator import RunLocator, is_run, originals, runs_below
from launcher.runs import provenance
from launcher.runs.known_trees import remember_trees, why_not_remembered
from launcher.runs.paths import LAUNCHES, display_path, find_runs, launch_numbers
from launcher.runs.trust import is_own

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
    """Find a run, from any directory; raise UserError unless exactly one matches.

    A word is a path, else a name below the base, else a job's id, else a name in any known tree.
    """
    if not word:
        raise UserError("'' names no run")
    locator = RunLocator(base_results_dir)
    ref = _find_by_path(word)
    if ref is None and stat.S_ISDIR(file_mode(base_results_dir / word / LAUNCHES)):
        ref = RunRef((base_results_dir / word).absolute())
    ref = ref or _find_by_job(word, locator) or _find_by_name(word, locator)
    if ref is None:
        raise _explain_not_found(word, locator)
    remember_trees([ref.run_dir.parent])
    return replace(ref, notes=(*ref.notes, *filter(None, [why_not_remembered()])))


def runs_in(base_results_dir: Path) -> list[Path]:
    """Return the directories of the runs below a directory, the last launched first."""
    run_dirs = find_runs(base_results_dir.absolute())
    if run_dirs:
        remember_trees({run_dir.parent for run_dir in run_dirs})
    return run_dirs


def _find_by_path(word: str) -> RunRef | None:
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
                return RunRef(run_dir, _find_number(path, run_dir))
    return None


def _find_number(path: Path, run_dir: Path) -> int | None:
    """Return the launch that a path in a run belongs to: the names at the top are links into one."""
    launches, target = (run_dir / LAUNCHES).resolve(), path.resolve()
    if not target.is_relative_to(launches) or target == launches:
        return None
    name = target.relative_to(launches).parts[0]
    return int(name) if name.isdecimal() else None


def _find_by_job(word: str, locator: RunLocator) -> RunRef | None:
    match = _JOB.fullmatch(word)
    if match is None or _find_below(word, locator.always):
        return None
    job_id, task = match[1], match[2]
    # A point of a sweep is recorded by its whole id, a task of another array by the array's.
    point = _select_by_job(word, locator.launches(job_id=word)) if task else []
    launches = point or _launches_of(job_id, locator)
    if task and not point:
        launches = [launch for launch in launches if not _is_point(launch, job_id)]
    if not launches:
        return None
    # Ids are reused, and every cluster has its own.
    *older, newest = sorted(originals(launches), key=lambda launch: launch.manifest.created)
    run_dir = newest.paths.run_dir
    if _is_point(newest, job_id):  # the array of a sweep: its other points are no alternatives
        older = [
            launch
            for launch in older
            if not (_is_point(launch, job_id) and launch.paths.run_dir.parent == run_dir.parent)
        ]
    others = ", ".join(
        f"{display_path(launch.paths.run_dir)} ({launch.manifest.created})" for launch in reversed(older)
    )
    note = f"several launches had a job {job_id}; the newest is taken, not that of {others}"
    notes = (note,) if older else ()
    return RunRef(run_dir, newest.paths.number, None if point else task, notes, job_id)


def _launches_of(job_id: str, locator: RunLocator) -> Sequence[Launch]:
    """Return the launches that had a job of this id.

    A launch of somebody else may be a copy of the user's own: the scheduler knows where that is.
    """
    known = _select_by_job(job_id, locator.launches(job_id=job_id))
    if any(is_own(launch.paths.manifest) for launch in known):
        return known
    with contextlib.suppress(UserError) if known else contextlib.nullcontext():
        known = locator.locate(job_id) or known
    return known or _select_by_job(job_id, locator.launches(locator.trees_of_jobs(), job_id))


def _select_by_job(job_id: str, launches: Iterable[Launch]) -> list[Launch]:
    """Return the launches that became this job, have it as a link, or are points of this array."""
    return [launch for launch in launches if job_id in launch.links.values() or _is_point(launch, job_id)]


def _is_point(launch: Launch, array: str) -> bool:
    """Return True if a launch is a point of a sweep with this array id."""
    return (launch.manifest.job_id or "").startswith(f"{array}_")


def _find_by_name(word: str, locator: RunLocator) -> RunRef | None:
    for tree in locator.always:
        run_dirs = _find_below(word, [tree]) or [run for run in runs_below([tree]) if run.name == word]
        if run_dirs:
            return RunRef(_choose_run(word, run_dirs))
    run_dirs = (
        _find_below(word, locator.trees)
        or _select_by_name(word, locator.launches())
        or _select_by_name(word, locator.launches(locator.trees_of_jobs()))
    )
    return RunRef(_choose_run(word, run_dirs)) if run_dirs else None


def _find_below(word: str, trees: Iterable[Path]) -> list[Path]:
    return [tree / word for tree in trees if is_run(tree / word)]


def _select_by_name(word: str, launches: Sequence[Launch]) -> list[Path]:
    """Return runs by the name of their directory, else by the name at launch."""
    by_directory = {launch.paths.run_dir for launch in launches if launch.paths.run_dir.name == word}
    by_manifest = {launch.paths.run_dir for launch in launches if launch.manifest.run == word}
    return sorted(by_directory or by_manifest)


def _choose_run(word: str, run_dirs: Sequence[Path]) -> Path:
    """Choose one of several runs of a name: no copy, and rather the user's own."""
    launches = {run_dir: found for run_dir in run_dirs if (found := readable_launches(run_dir))}
    if len(run_dirs) == 1 or not launches:
        return run_dirs[0]
    # A copy begins with the same launch, however it continued.
    firsts = originals([found[0] for found in launches.values()])
    left = [launches[first.paths.run_dir][-1] for first in firsts]
    left = [launch for launch in left if is_own(launch.paths.manifest)] or left
    me = provenance.user()
    left = [launch for launch in left if launch.manifest.user == me] or left
    if len(left) == 1:
        return left[0].paths.run_dir
    choices = "\n".join(
        escape(f"{display_path(launch.paths.run_dir)}  ({launch.manifest.user}, {launch.manifest.created})")
        for launch in left
    )
    raise UserError(
        f"there are several runs {escape(repr(word))}; name the one you mean by its directory", hint=choices
    )


def _explain_not_found(word: str, locator: RunLocator) -> UserError:
    launches = locator.launches()
    names = sorted({name for launch in launches for name in (launch.manifest.run, launch.paths.run_dir.name)})
    if _JOB.fullmatch(word):
        what = f"there is no run {word!r}, and no launch of a job of that id is known"
    else:
        what = f"there is no run {escape(repr(word))}: neither a path in one nor a name that is known"
    trees = [escape(shlex.quote(display_path(tree))) for tree in locator.trees]
    looked = f"looked in {', '.join(trees[:_MAX_NAMED])}"
    more = f" and {len(trees) - _MAX_NAMED} more" if len(trees) > _MAX_NAMED else ""
    hints = [
        _suggest_run(word, names),
        looked + more,
        *_holds_runs(word),
        *locator.remarks,
        why_not_remembered(),
    ]
    return UserError(what, hint="\n".join(hint for hint in hints if hint))


def _suggest_run(word: str, names: Sequence[str]) -> str:
    near = nearest(word, names)
    if near:
        return f"did you mean {near[0]!r}?"
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return f"runs: {', '.join(map(escape, names[:_MAX_NAMED])) or 'none'}{more}"


def _holds_runs(word: str) -> list[str]:
    if not Path(word).is_dir() or next(runs_below([Path(word)]), None) is None:
        return []
    return [f"there are runs below it: slipway status --base-results-dir {shlex.quote(word)}"]
