"""`slipway status`: how the newest launches of runs are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from launcher.monitor.overview import COLUMNS, survey
from launcher.monitor.tables import print_table
from launcher.runs.paths import find_run, find_runs, launch_numbers
from launcher.schedulers.base import State

_DESCRIPTION = """\
Tell how runs are: what the scheduler says of the newest launch of each, and how far its trainer came.

examples:
  slipway status                      the runs in results/, those launched last coming first
  slipway status gpt3_126m            one run, by its name or its directory
  slipway status --json | jq '.[] | select(.state == "FAILED") | .run'

exit code:
  0  the state of every run could be told
  1  the state of some run is UNKNOWN
  2  there is no such run"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "status",
        help="how runs are",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's name or directory; default: all runs")
    add_base_results_dir(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=run)


def add_base_results_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that all verbs about runs share."""
    parser.add_argument(
        "--base-results-dir",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="where runs are looked for by name (default: results)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    base: Path = args.base_results_dir
    run_dirs = [find_run(name, base) for name in args.runs] or [
        run_dir.absolute() for run_dir in find_runs(base) if launch_numbers(run_dir)
    ]
    seen = survey(run_dirs)
    if args.json:
        print(json.dumps([item.to_json() for item in seen], indent=2))
    elif seen:
        print_table(COLUMNS, [item.cells() for item in seen], [item.status.state for item in seen])
    else:
        print(f"no run was launched in {base} yet", file=sys.stderr)
    return 1 if any(item.status.state is State.UNKNOWN for item in seen) else 0
