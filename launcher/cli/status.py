"""`slipway status`: show the state of runs, once or continuously."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launcher.cli.options import Verbs, add_option, add_verb, seconds_from
from launcher.cli.runs import NEWEST, RUNS_HELP, add_base_results_dir, find_all, print_resumable
from launcher.errors import DONE, NOT_KNOWN, WATCHING_ENDED, escape
from launcher.jobs.asking import ASK_SECONDS
from launcher.jobs.lookup import RunRef, runs_in
from launcher.monitor.polling import StatusPoller
from launcher.monitor.run_status import (
    StatusRow,
    collect_status,
    make_table,
    missing_run,
    refresh_progress,
)
from launcher.monitor.watching import watch
from launcher.runs.paths import display_path
from launcher.slurm.states import State, choose_exit_code
from launcher.sweeps.record import sweeps_in
from launcher.ui.tables import print_table
from launcher.ui.terminal import print_json, print_message, print_stderr
from slipway.common.files import names_in

_LEAST_INTERVAL = 2.0  # seconds

_HELP = """\
Show the state of runs: the scheduler's state of the waiting and running launches of each, or else of its
newest, and the progress of its trainer. However many runs there are, the scheduler is asked once.

examples:
  slipway status                      the newest twenty runs in results/, and all that have not ended
  slipway status --active             only those that have not ended
  slipway status gpt3_126m            one run, by its name or its directory
  slipway status 4711                 one launch, by the id of its job
  slipway status --watch              all of them, until everything has ended
  slipway status --json | jq '.[] | select(.state == "FAILED") | .run'
  slipway status a b --watch >/dev/null && echo both completed

A state that is not known is UNKNOWN. In a pipe --watch prints a line per change, as JSON with --json. It
reads the files of the runs each second, and asks Slurm at once when they say that a job began or ended.

exit code:
  0    the state of every run is known; with --exit-code or --watch: and all completed
  2    there is no such run
  3    the state of some run is UNKNOWN
with --exit-code, and at the end of --watch, the worst of all runs, in this order:
  1    a run failed, or stopped before it completed
  3    the state of some run is UNKNOWN
  75   a training was interrupted: slipway resume continues it
  4    a run is pending or running
  0    all completed
  130  Ctrl-C; the jobs continue"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "status", run, text=_HELP)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS_HELP}; default: all runs")
    add_base_results_dir(parser)
    add_option(parser, "--active", "only runs with a job that has not ended")
    add_option(parser, "--all", f"all runs, not the newest {NEWEST}")
    add_option(parser, "--watch", "watch until everything has ended")
    text = f"how often --watch asks Slurm (default: {ASK_SECONDS:g}, at least {_LEAST_INTERVAL:g})"
    add_option(parser, "--interval SECONDS", text, type=seconds_from(_LEAST_INTERVAL), default=ASK_SECONDS)
    add_option(parser, "--exit-code", "exit with the code of the worst state")
    add_option(parser, "--json", "print a list of objects")


def run(args: argparse.Namespace) -> int:
    look = partial(_look, find_all(args.runs, args.base_results_dir), args.base_results_dir)
    rows = look() if args.active or not args.watch else ()
    if args.active:
        rows = [row for row in rows if row.may_live]
        look = partial(_look, [RunRef(row.run_dir, row.number) for row in rows], args.base_results_dir)
        if not rows:
            print_stderr("no job is pending or running")
    if args.watch and not (args.active and not rows):
        return _watch(args, look)
    if args.json:
        print_json([row.to_json() for row in rows])
    elif rows:
        shown = rows if args.all or args.runs else _select_newest(rows)
        print_table(*make_table(shown), [row.state for row in shown])
        print_resumable(shown)
        if len(shown) < len(rows):
            print_message(f"{len(rows) - len(shown)} older runs: slipway status --all")
    elif not args.active:
        _print_no_runs(args.base_results_dir)
    if not args.runs and (hidden := _count_unreadable(args.base_results_dir)):
        print_message(f"runs that cannot be read, for want of permission: {hidden}")
    if not (args.runs or args.active):
        # A hundred points would hide all other runs.
        for directory, count in sweeps_in(args.base_results_dir):
            where = escape(shlex.quote(display_path(directory)))
            print_message(f"a sweep of {count} points: slipway sweep --results {where}")
    states = [row.state for row in rows]
    if args.exit_code:
        return choose_exit_code(states)
    return NOT_KNOWN if State.UNKNOWN in states else DONE


def _select_newest(rows: Sequence[StatusRow]) -> list[StatusRow]:
    """Return the newest rows, and older ones with jobs that have not ended."""
    return [row for place, row in enumerate(rows) if place < NEWEST or row.may_live]


def _look(requested: Sequence[RunRef], base: Path) -> Sequence[StatusRow]:
    """Read the state of the requested runs; by default of all runs that exist by now."""
    if not requested:
        return collect_status(list(map(RunRef, runs_in(base))))
    seen = collect_status(requested)
    existing = {item.run_dir for item in seen}
    run_dirs = dict.fromkeys(ref.run_dir for ref in requested)
    return [*seen, *(missing_run(run_dir) for run_dir in run_dirs if run_dir not in existing)]


def _watch(args: argparse.Namespace, look: partial[Sequence[StatusRow]]) -> int:
    poller = StatusPoller(look, args.interval, refresh=refresh_progress)
    if not poller.snapshot().rows:
        _print_no_runs(args.base_results_dir)
        return DONE
    try:
        last = watch(poller, args.interval, lines_of_json=args.json)
    except KeyboardInterrupt:
        print_stderr("stopped watching; the jobs continue")
        return WATCHING_ENDED
    return choose_exit_code(last.states)


def _count_unreadable(base: Path) -> int:
    """Return how many directories of a team's results are closed to this user: runs, as far as one sees."""
    paths = (base / name for name in names_in(base))
    return sum(not os.access(path, os.X_OK, effective_ids=True) for path in paths if os.path.isdir(path))  # noqa: PTH112


def _print_no_runs(base: Path) -> None:
    if not sweeps_in(base) and not _count_unreadable(base):
        print_stderr(f"no run was launched in {base} yet")
