"""Shared parts of the verbs about runs: how a command line names a run."""

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
    """Add the run of a verb, and one of its launches."""
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
        help="the directory to search for runs by name (default: results)",
    )


def named_run(args: argparse.Namespace) -> RunRef:
    """Return the run that the command line names; `launch` is the number of --launch, or that of the job."""
    run = find_one(args.run_name, args.base_results_dir)
    return run if args.launch is None else replace(run, launch=args.launch)


def find_all(words: Sequence[str], base_results_dir: Path) -> list[RunRef]:
    """Return the runs that words name, in their order; print other meanings of the words to stderr.

    A sweep, or its array, stands for all of its points.
    """
    runs = [run for word in words for run in _named(word, base_results_dir)]
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(f"slipway: {one_line(note)}", file=sys.stderr)
    return runs


def find_one(word: str, base_results_dir: Path) -> RunRef:
    """Return the only run that a word names.

    Raises
    ------
    UserError
        If it is a sweep of several runs.
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
    """Return the runs that one word names."""
    points = _points(word, base_results_dir)
    if points:
        return points
    ref = find_run(word, base_results_dir)
    return _array(ref) or [ref] if ref.job == word else [ref]


def _array(ref: RunRef) -> list[RunRef]:
    """Return all points of the array of a point, each with the launch that was a task of it."""
    sweep_dir, own = ref.run_dir.parent, (ref.run_dir.name, ref.launch)
    for record in read_records(sweep_dir):
        points = [(str(point["name"]), point.get("launch")) for point in record.points]
        if own in points:
            return [replace(ref, run_dir=sweep_dir / name, launch=number) for name, number in points]
    return []


def _points(word: str, base_results_dir: Path) -> list[RunRef]:
    """Return the points of a sweep that a word names by its directory or below the base; empty otherwise."""
    for directory in (Path(word), base_results_dir / word):
        if word and (points := points_of(directory)):
            return [RunRef(run_dir) for run_dir in points]
    return []
