"""What the verbs about runs share: how a run is named on the command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import UserError, one_line
from launcher.jobs.lookup import RunRef, find_run
from launcher.runs.paths import short
from launcher.sweeps.record import points_of, read_records

RUN_HELP = "a run's name, a path in it, or the id of one of its jobs"
RUNS_HELP = f"{RUN_HELP}; a sweep is all of its points"


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run that a verb is about, and one of its launches."""
    parser.add_argument("run_name", metavar="RUN", help=RUN_HELP)
    add_launch(parser)
    add_base_results_dir(parser)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the choice of one launch."""
    parser.add_argument("--launch", type=int, metavar="N", help="which launch (default: the newest)")


def add_base_results_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that all verbs about runs share."""
    parser.add_argument(
        "--base-results-dir",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="where runs are looked for by name (default: results)",
    )


def found(args: argparse.Namespace) -> RunRef:
    """The run that was asked for; `launch` is the number that was, or that of the job."""
    run = find_one(args.run_name, args.base_results_dir)
    return run if args.launch is None else replace(run, launch=args.launch)


def find_all(words: Sequence[str], base_results_dir: Path) -> list[RunRef]:
    """The runs that were asked for, in their order; what else a word could have meant is told.

    A sweep is all of its points, and so is the array that they are.
    """
    runs = [run for word in words for run in _named(word, base_results_dir)]
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(f"slipway: {one_line(note)}", file=sys.stderr)
    return runs


def find_one(word: str, base_results_dir: Path) -> RunRef:
    """The one run that was asked for.

    Raises
    ------
    UserError
        If it is a sweep, which is several.
    """
    runs = find_all([word], base_results_dir)
    if len(runs) > 1:
        point, sweep = (one_line(shlex.quote(short(it))) for it in (runs[0].run_dir, runs[0].run_dir.parent))
        raise UserError(
            f"{one_line(word)} is a sweep of {len(runs)} points: name one, such as {point}",
            hint=f"all of them: slipway sweep --results {sweep}",
        )
    return runs[0]


def _named(word: str, base_results_dir: Path) -> list[RunRef]:
    """What one word names."""
    points = _points(word, base_results_dir)
    if points:
        return points
    run = find_run(word, base_results_dir)
    return _array(run) or [run] if run.job == word else [run]


def _array(one: RunRef) -> list[RunRef]:
    """All points of the array that one of them was found by, each in the launch that was a task of it."""
    sweep_dir, own = one.run_dir.parent, (one.run_dir.name, one.launch)
    for record in read_records(sweep_dir):
        points = [(str(point["name"]), point.get("launch")) for point in record.points]
        if own in points:
            return [replace(one, run_dir=sweep_dir / name, launch=number) for name, number in points]
    return []


def _points(word: str, base_results_dir: Path) -> list[RunRef]:
    """The points of a sweep, if it is one that a word names: by its directory, or below the base."""
    for directory in (Path(word), base_results_dir / word):
        if word and (points := points_of(directory)):
            return [RunRef(run_dir) for run_dir in points]
    return []
