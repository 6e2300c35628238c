"""`slipway list`: the choices of the configuration, and the existing runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import add_base_results_dir
from launcher.errors import UserError, one_line
from launcher.jobs.locator import RunLocator
from launcher.runs.index import Entry
from launcher.runs.paths import short
from launcher.ui.tables import moment, print_listing, text

_HELP = """\
List the configuration's choices (stages, model families and sizes, clusters), or runs.

examples:
  slipway list                     the stages, model families and clusters
  slipway list training            every model size with its parameters, as training=SIZE takes it
  slipway list clusters --config-dir conf
  slipway list training --json | jq -r '.[] | select(.parameters < 1e9) | .size'
  slipway list runs                the runs in results/, the newest first
  slipway list --all               every known run: of all users, in all directories seen before
  slipway list --all --json | jq -r '.[] | select(.user == "ada") | .run_dir'

PARAMETERS are counted from the sizes of the model and the published vocabulary of its tokenizer, padded as in
the training. With an unknown tokenizer they are those of the layers alone, marked with a +.

Known runs are those in results/, in the directories that $SLIPWAY_RESULTS_DIR lists (separated by :), and in
those where `slipway` saw runs before. No scheduler is asked; `slipway status` shows the state of runs.

exit code:
  0  listed
  1  a size could not be composed; its row has a -, the reason is on stderr
  2  a mistake in the command line
"""

_RUNS = "runs"
_CHOICES = ("stages", "training", "clusters", "families")
_WITHOUT_NAME = ("stages", "families", "clusters")


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "list", run, "list the stages, model sizes, clusters or runs", _HELP)
    names = [*_CHOICES, _RUNS]
    parser.add_argument("what", nargs="?", choices=names, metavar="WHAT", help=", ".join(names))
    add_option(parser, "--all", "every known run, in all directories")
    add_option(parser, "--json", "print a list of objects, or one of such lists")
    add_option(parser, "--config-dir DIR", "a conf tree of your own, read first")
    add_base_results_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables; return the exit code."""
    if args.all and args.what not in (None, _RUNS):
        raise UserError(f"--all lists runs: slipway list --all, not slipway list {args.what} --all")
    if args.all or args.what == _RUNS:
        return list_runs(args.base_results_dir, everywhere=args.all, as_json=args.json)
    return _list_choices(args)


def _list_choices(args: argparse.Namespace) -> int:
    # Imported late: it composes configurations, which listing runs does not need.
    from launcher.cli.list_choices import LISTS, print_choices

    names = [args.what] if args.what else _WITHOUT_NAME
    lists: dict[str, list[dict[str, Any]]] = {name: list(LISTS[name](args.config_dir)) for name in names}
    if args.json:
        print(json.dumps(lists[args.what] if args.what else lists, indent=2))
    else:
        for index, (name, rows) in enumerate(lists.items()):
            if index:
                print()
            print_choices(name, rows)
    errors = [row["error"] for rows in lists.values() for row in rows if "error" in row]
    for error in errors:
        print(f"slipway: {error}", file=sys.stderr)
    return 1 if errors else 0


_COLUMNS = ("RUN", "LAUNCHES", "LAST LAUNCHED", "USER", "JOB", "IN")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run with its newest readable launch."""

    newest: Entry
    launches: int

    def cells(self) -> tuple[str, ...]:
        """Return the values of the columns."""
        newest = self.newest
        values = (newest.run_dir.name, self.launches, moment(newest.created), newest.user, newest.job_id)
        return tuple(one_line(text(value)) for value in (*values, short(newest.run_dir.parent)))

    def to_json(self) -> dict[str, Any]:
        """Return the run for programs."""
        newest = self.newest
        return {
            "run": newest.run_dir.name,
            "run_dir": str(newest.run_dir),
            "tree": str(newest.run_dir.parent),
            "launches": self.launches,
            "last_launched": newest.created,
            "user": newest.user,
            "job_id": newest.job_id,
            "scheduler": newest.scheduler,
        }


def list_runs(base_results_dir: Path, *, everywhere: bool, as_json: bool) -> int:
    """Print the runs, the newest first; return the exit code."""
    known = RunLocator(base_results_dir)
    entries = known.launches(None if everywhere else [base_results_dir])
    listed = _by_run(known.originals(entries) if everywhere else entries)
    if as_json:
        print(json.dumps([run.to_json() for run in listed], indent=2))
    elif listed:
        print_listing(_COLUMNS, [run.cells() for run in listed], numbers=1)
    if not listed:
        where = "in the known directories" if everywhere else f"in {base_results_dir}"
        print(f"no run was launched {where} yet", file=sys.stderr)
    if known.index.trouble:
        print(f"slipway: {one_line(known.index.trouble)}", file=sys.stderr)
    return 0


def _by_run(entries: Iterable[Entry]) -> list[Listed]:
    by_run: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run_dir, []).append(entry)
    listed = [Listed(launches[-1], len(launches)) for launches in by_run.values()]
    return sorted(listed, key=lambda run: run.newest.created, reverse=True)
