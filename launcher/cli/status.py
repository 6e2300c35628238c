"""`slipway status`: show the state of runs, once or continuously."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launcher.cli.runs import RUNS_HELP, add_base_results_dir, find_all
from launcher.errors import DONE, NOT_KNOWN, WATCHING_ENDED, one_line
from launcher.jobs.lookup import RunRef, runs_in
from launcher.monitor.run_status import StatusRow, as_table, collect_status, gone
from launcher.runs.paths import short
from launcher.slurm.states import State, worst_exit_code
from launcher.sweeps.record import sweeps_in
from launcher.ui.tables import print_table

_INTERVAL, _LEAST_INTERVAL = 5.0, 2.0  # seconds; a controller serves thousands of users

_DESCRIPTION = """\
Show the state of runs: the scheduler's state of the waiting and running launches of each, or else of its
newest, and the progress of its trainer. However many runs there are, the scheduler is asked once.

examples:
  slipway status                      the runs in results/, the last launched first
  slipway status gpt3_126m            one run, by its name or its directory
  slipway status 4711                 one launch, by the id of its job
  slipway status --watch              all of them, until everything has ended
  slipway status --json | jq '.[] | select(.state == "FAILED") | .run'
  slipway status a b --watch >/dev/null && echo both completed

A state that is not known is UNKNOWN. In a pipe --watch prints a line per change, as JSON with --json.

exit code:
  0    the state of every run is known; with --exit-code or --watch: and all completed
  2    there is no such run
  3    the state of some run is UNKNOWN
with --exit-code, and at the end of --watch, the worst of all runs, in this order:
  1    a run failed, or ended before its end
  3    the state of some run is UNKNOWN
  75   a training was interrupted: launching it again continues
  4    a run waits or goes on
  0    all completed
  130  Ctrl-C; the jobs go on"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("status", help="show the state of runs", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS_HELP}; default: all runs")
    add_base_results_dir(parser)
    parser.add_argument("--watch", action="store_true", help="go on until everything has ended")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=_INTERVAL,
        metavar="SECONDS",
        help=f"how often --watch asks (default: {_INTERVAL:g}, at least {_LEAST_INTERVAL:g})",
    )
    parser.add_argument("--exit-code", action="store_true", help="exit with the code of the worst state")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _LEAST_INTERVAL <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {_LEAST_INTERVAL:g} seconds")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Print the table, once or continuously."""
    look = partial(_look, find_all(args.runs, args.base_results_dir), args.base_results_dir)
    if args.watch:
        return _watch(args, look)
    rows = look()
    if args.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
    elif rows:
        print_table(*as_table(rows), [row.status.state for row in rows])
    else:
        _print_no_runs(args.base_results_dir)
    if not args.runs:
        _print_sweeps(args.base_results_dir)
    states = [row.status.state for row in rows]
    if args.exit_code:
        return worst_exit_code(states)
    return NOT_KNOWN if State.UNKNOWN in states else DONE


def _look(wanted: Sequence[RunRef], base: Path) -> Sequence[StatusRow]:
    """Look at what was asked for; by default at all runs that there are by now."""
    if not wanted:
        return collect_status(runs_in(base))
    whole = {item.run_dir for item in wanted if item.launch is None}
    only: dict[Path, list[int]] = {}
    for item in wanted:
        if item.launch is not None and item.run_dir not in whole:
            only.setdefault(item.run_dir, []).append(item.launch)
    run_dirs = list(dict.fromkeys(item.run_dir for item in wanted))
    seen = collect_status(run_dirs, only)
    there = {item.run_dir for item in seen}
    return [*seen, *(gone(run_dir) for run_dir in run_dirs if run_dir not in there)]


def _watch(args: argparse.Namespace, look: partial[Sequence[StatusRow]]) -> int:
    from launcher.monitor.watching import StatusPoller, watch

    poller = StatusPoller(look, args.interval)
    if not poller.snapshot().rows:
        _print_no_runs(args.base_results_dir)
        return DONE
    try:
        last = watch(poller, args.interval, lines_of_json=args.json)
    except KeyboardInterrupt:
        print("the jobs go on without being watched", file=sys.stderr)
        return WATCHING_ENDED
    return worst_exit_code(last.states)


def _print_sweeps(base: Path) -> None:
    """Name the sweeps: a hundred points would hide all other runs."""
    for directory, count in sweeps_in(base):
        where = one_line(shlex.quote(short(directory)))
        print(f"slipway: a sweep of {count} points: slipway sweep --results {where}", file=sys.stderr)


def _print_no_runs(base: Path) -> None:
    if sweeps_in(base):
        return
    print(f"no run was launched in {base} yet", file=sys.stderr)
