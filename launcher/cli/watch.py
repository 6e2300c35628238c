"""`slipway watch`: look for what goes wrong in runs, record it, and tell people."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.options import Verbs, add_option, add_verb, seconds_from
from launcher.cli.runs import RUNS_HELP, add_base_results_dir, find_all
from launcher.errors import DONE, NOT_KNOWN, WATCHING_ENDED, WENT_WRONG, UserError, escape
from launcher.jobs.lookup import RunRef, runs_in
from launcher.runs.paths import display_path
from launcher.slurm.states import State
from launcher.ui.terminal import print_stderr

if TYPE_CHECKING:
    from launcher.monitor.run_watch import Look

_INTERVAL, _LEAST_INTERVAL = 60.0, 30.0  # seconds

_HELP = """\
Look for what goes wrong in runs, record alerts in alerts.jsonl of each run, and tell people.

The job of a run looks at its own training every few seconds, and tells people as `watch.tell` says. This
verb sees what a job cannot: jobs that never started, and jobs that ended without a word. It also delivers
what nodes could not, and by the services of apprise. Slurm is asked once, however many runs there are.

examples:
  slipway watch                         the runs in results/ that have not ended, once
  slipway watch gpt3_126m --follow      one run, every minute, until Ctrl-C
  slipway watch --deliver               also deliver the messages that wait
  */5 * * * * cd ~/llm && .venv/bin/slipway watch --deliver    a line for crontab: it prints open alerts alone
  slipway watch --json | jq '.[].alerts[].why'

exit code:
  0    no alert is open
  1    an alert is open
  2    there is no such run
  3    no alert is open, but the state of some run is UNKNOWN, or nothing could be recorded
  130  Ctrl-C"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "watch", run, text=_HELP)
    text = f"{RUNS_HELP}; default: all runs that have not ended"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)
    add_base_results_dir(parser)
    add_option(parser, "--all", "all runs that have not ended, as without RUN")
    add_option(parser, "--follow", "look again and again, until Ctrl-C")
    text = f"how often --follow looks (default: {_INTERVAL:g}, at least {_LEAST_INTERVAL:g})"
    add_option(parser, "--interval SECONDS", text, type=seconds_from(_LEAST_INTERVAL), default=_INTERVAL)
    add_option(parser, "--deliver", "deliver the messages that wait, also by apprise")
    add_option(parser, "--json", "print a list of objects; with --follow one list a line")


def run(args: argparse.Namespace) -> int:
    if args.all and args.runs:
        raise UserError(f"--all and {args.runs[0]}: name runs, or all of them")
    refs = find_all(args.runs, args.base_results_dir)
    printed: dict[str, int] = {}
    try:
        while True:
            code = _look_once(args, refs or list(map(RunRef, runs_in(args.base_results_dir))), printed)
            if not args.follow:
                return code
            time.sleep(args.interval)
    except KeyboardInterrupt:
        print_stderr("stopped watching; the jobs continue, and watch themselves")
        return WATCHING_ENDED


def _look_once(args: argparse.Namespace, refs: Sequence[RunRef], printed: dict[str, int]) -> int:
    from launcher.monitor import run_watch  # late: --help needs none of it

    looks = run_watch.look_at(refs)
    attempts = run_watch.deliver(looks) if args.deliver else []
    if args.json:
        print(json.dumps([look.to_json() for look in looks]), flush=True)
    else:
        for look in looks:
            _print_look(look, printed, is_named=bool(args.runs))
        for named, message, route, result in attempts:
            how = "delivered" if result.state == "sent" else f"not delivered: {result.why}"
            print(escape(f"{named.name}: {message.name} by {route}: {how}"), flush=True)
    if any(look.alerts for look in looks):
        return WENT_WRONG
    is_unknown = any(look.problem or look.status.state is State.UNKNOWN for look in looks)
    return NOT_KNOWN if is_unknown else DONE


def _print_look(look: Look, printed: dict[str, int], *, is_named: bool) -> None:
    """Print the open alerts of a run, each again only if it has a new message; of a named run all."""
    where = escape(display_path(look.status.run_dir))
    if look.problem:
        print_stderr(f"{where}: nothing could be recorded: {escape(look.problem)}")
    for alert in look.alerts:
        newest = alert.newest
        if printed.get(f"{where} {newest.alert}") != newest.number:
            printed[f"{where} {newest.alert}"] = newest.number
            print(f"{where}: {escape(newest.why)} ({newest.alert})", flush=True)
    if is_named and not look.alerts:
        who = "its job watches it" if look.job_looks else f"its job is {look.status.state.value}"
        print(f"{where}: no alert is open; {who}", flush=True)
        for reading in look.blind if not look.job_looks else ():
            print(f"  {reading.detector} is blind: {escape(reading.why)}", flush=True)
