"""`slipway clean`: thin out the checkpoints of runs, archive runs, or remove them."""

from __future__ import annotations

import argparse
import sys

from rich.filesize import decimal

from launcher.cli.options import Verbs, add_option, add_verb, whole_number
from launcher.cli.runs import RUNS_HELP, add_base_results_dir, find_all
from launcher.errors import UserError, escape
from launcher.estimates.values import count
from launcher.jobs import cleaning
from launcher.runs.paths import display_path
from launcher.ui.tables import print_listing
from launcher.ui.terminal import agrees

_HELP = """\
Show the checkpoints of runs and their sizes; with options, in this order: remove some of them, pack the run
into a file, remove the run. A run with jobs under way, and one of somebody else's, is refused.

The newest checkpoint stays, and one that is damaged, or that a link, another training or a job under way
names. With both --keep options a checkpoint stays that either keeps.

examples:
  slipway clean gpt3_126m                                       the checkpoints and their sizes
  slipway clean gpt3_126m --keep-every 10000 --keep-last 3 --dry-run
  slipway clean first second --remove --yes                     in a script
  slipway clean gpt3_126m --keep-last 1 --archive /archive --remove

exit code:
  0  shown, or done
  2  a mistake, a run that may not be cleaned, or no terminal and no --yes; nothing was removed"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "clean", run, text=_HELP)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS_HELP)
    number = whole_number(1)
    add_option(parser, "--keep-every N", "remove checkpoints, but not of steps N, 2N, 3N, ...", type=number)
    add_option(parser, "--keep-last N", "remove checkpoints, but not the N newest", type=number)
    add_option(parser, "--archive DIR", "then pack the run into DIR/RUN.tar")
    add_option(parser, "--remove", "then remove the run")
    add_option(parser, "--dry-run", "only show it")
    add_option(parser, "-y --yes", "do not ask")
    add_base_results_dir(parser)


def run(args: argparse.Namespace) -> None:
    """Show what may go, ask, and carry it out."""
    every, last = args.keep_every, args.keep_last

    def stays(step: int, place: int) -> str | None:
        if every is None and last is None:
            return ""
        if every is not None and step % every == 0:
            return f"{step // every} × {every}"
        return f"one of {last}" if last is not None and place < last else None

    runs = list(dict.fromkeys(ref.run_dir for ref in find_all(args.runs, args.base_results_dir)))
    for run_dir in runs if every or last or args.archive or args.remove else ():
        cleaning.require_idle(run_dir)
        user, _ = next(cleaning.users_of(run_dir), ("", ())) if args.remove else ("", ())
        if user:
            raise UserError(escape(f"{display_path(run_dir)}: {user} uses its files"))
    rows, surplus = [], []
    for run_dir in runs:
        rows.append((escape(display_path(run_dir)), "", decimal(cleaning.size_of(run_dir)), ""))
        for item in cleaning.checkpoints(run_dir, stays):
            kept = "goes with the run" if args.remove else f"stays: {item.stays}"
            why = "remove" if item.stays is None else item.stays and kept
            rows.append((f"  {escape(item.path.name)}", str(item.step), decimal(item.size), why))
            surplus += [item] if item.stays is None else []
    print_listing(("RUN", "STEP", "SIZE", ""), rows)
    size = decimal(sum(item.size for item in surplus))
    todo = [f"remove {count(len(surplus), 'checkpoint')}, {size}"] if surplus else []
    todo += [f"{verb} {count(len(runs), 'run')}" for verb in ("archive", "remove") if getattr(args, verb)]
    if not todo or args.dry_run:
        return print(*todo, sep="; ", end="\n" if todo else "")
    if not (args.yes or sys.stdin.isatty()):
        raise UserError("nothing was removed: no terminal to ask on", hint="to do it: --yes")
    print("; ".join(todo), end="\n" if args.yes else "? ", flush=True)
    if not (args.yes or agrees(sys.stdout)):
        raise UserError("nothing was removed")
    for item in surplus:
        cleaning.remove(item.path)
    for run_dir in runs:
        if args.archive:
            print(cleaning.archive(run_dir, args.archive), flush=True)
        if args.remove:
            cleaning.remove(run_dir)
    return None
