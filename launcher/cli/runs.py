"""The arguments that name a run on the command line, shared by the verbs about runs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.cli.options import add_option
from launcher.errors import UserError, escape
from launcher.jobs.lookup import RunRef, find_run, runs_in
from launcher.jobs.status import LaunchStatus
from launcher.runs.paths import display_path
from launcher.slurm.states import State
from launcher.sweeps.record import points_of, read_records
from launcher.ui.terminal import print_message, print_stderr

NEWEST = 20  # runs of a table
_HINTED = 3

RUN_HELP = "a run's name, a path in it, or the id of one of its jobs"
RUNS_HELP = f"{RUN_HELP}; a sweep means all of its points"


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    add_option(parser, "--launch N", "which launch (default: the newest)")
    add_base_results_dir(parser)


def add_base_results_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that all verbs about runs share."""
    text = "directory in which runs are found by name (default: results)"
    add_option(parser, "--base-results-dir DIR", text, default=Path("results"))


def print_resumable(
    statuses: Iterable[LaunchStatus], states: Container[State] = (State.INTERRUPTED,)
) -> None:
    """Print the command that continues the first of the runs that are in one of some states."""
    runs = dict.fromkeys(item.run_dir for item in statuses if item.state in states)
    if runs:
        first, *others = (escape(shlex.quote(display_path(run_dir))) for run_dir in runs)
        more = f" (and {len(others)} more)" if others else ""
        print_stderr(f"to continue: slipway resume {first}{more}")


def hint_newest_runs(base_results_dir: Path) -> str | None:
    """Return a hint with the newest runs of a directory; None if it has no run."""
    names = [escape(shlex.quote(run_dir.name)) for run_dir in runs_in(base_results_dir)[:_HINTED]]
    return f"the newest in {display_path(base_results_dir)}: {', '.join(names)}" if names else None


def select_run(args: argparse.Namespace) -> RunRef:
    """Return the run that the arguments name; `launch` is the requested number, or that of the job."""
    run = find_one(args.run_name, args.base_results_dir)
    return run if args.launch is None else replace(run, launch=args.launch)


def find_all(words: Sequence[str], base_results_dir: Path) -> list[RunRef]:
    """Return the runs that the words name, of a sweep all points; print notes about ambiguous words."""
    runs = [run for word in words for run in _find_named(word, base_results_dir)]
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print_message(escape(note))
    return runs


def find_one(word: str, base_results_dir: Path) -> RunRef:
    """Return the one run that a word names; raise UserError if it names a sweep of several points."""
    runs = find_all([word], base_results_dir)
    if len(runs) > 1:
        run_dir = runs[0].run_dir
        point, sweep = (escape(shlex.quote(display_path(path))) for path in (run_dir, run_dir.parent))
        raise UserError(
            f"{escape(word)} is a sweep of {len(runs)} points: name one of them, such as {point}",
            hint=f"to show all of them: slipway sweep --results {sweep}",
        )
    return runs[0]


def _find_named(word: str, base_results_dir: Path) -> list[RunRef]:
    for directory in (Path(word), base_results_dir / word):
        if word and (points := points_of(directory)):  # a sweep
            return [RunRef(run_dir) for run_dir in points]
    ref = find_run(word, base_results_dir)
    return _array(ref) or [ref] if ref.job == word else [ref]


def _array(point: RunRef) -> list[RunRef]:
    """Return all points of the array that a point belongs to, each with the launch that was its task."""
    sweep_dir, own = point.run_dir.parent, (point.run_dir.name, point.launch)
    for record in read_records(sweep_dir):
        points = [(str(entry["name"]), entry.get("launch")) for entry in record.points]
        if own in points:
            return [replace(point, run_dir=sweep_dir / name, launch=number) for name, number in points]
    return []
