"""What the verbs about runs share: how a run is named on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import one_line
from launcher.tracking.finding import Found, find

RUN_HELP = "a run's name, a path in it, or the id of one of its jobs"


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


def found(args: argparse.Namespace) -> Found:
    """The run that was asked for; `launch` is the number that was, or that of the job."""
    (run,) = find_all([args.run_name], args.base_results_dir)
    return run if args.launch is None else replace(run, launch=args.launch)


def find_all(words: Sequence[str], base_results_dir: Path) -> list[Found]:
    """The runs that were asked for, in their order; what else a word could have meant is told."""
    runs = [find(word, base_results_dir) for word in words]
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(f"slipway: {one_line(note)}", file=sys.stderr)
    return runs
