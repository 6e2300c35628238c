"""`slipway list`: what can be chosen, and the runs there are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launcher.cli.runs import add_base_results_dir
from launcher.errors import UserError

_EPILOG = """\
examples:
  slipway list                     the stages, model families and clusters
  slipway list training            every model size with its parameters, as training=SIZE takes it
  slipway list clusters --config-dir conf
  slipway list training --json | jq -r '.[] | select(.parameters < 1e9) | .size'
  slipway list runs                the runs in results/, those launched last coming first
  slipway list --all               every run that is known: of all users, in all directories seen before
  slipway list --all --json | jq -r '.[] | select(.user == "ada") | .run_dir'

PARAMETERS are counted from the shape of the model and the published vocabulary of its tokenizer, padded as in
the training. Of an unknown tokenizer they are those of the layers alone, marked with a +.

Known are the runs in results/, in the directories that $SLIPWAY_RESULTS_DIR lists (with a : between), and
in those where `slipway` saw runs before. How they are tells `slipway status`: nothing here asks a scheduler.

exit code:
  0  listed
  1  a size could not be composed; its row says -, and why stands on stderr
  2  a mistake in what was asked for
"""

_RUNS = "runs"
_CHOICES = ("stages", "training", "clusters", "families")
_WITHOUT_NAME = ("stages", "families", "clusters")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "list",
        help="the stages, model sizes, clusters and runs there are",
        description="List what can be chosen (stages, model families and sizes, clusters), or the runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*_CHOICES, _RUNS]
    parser.add_argument("what", nargs="?", choices=names, metavar="WHAT", help=", ".join(names))
    parser.add_argument("--all", action="store_true", help="every run that is known, wherever it is")
    parser.add_argument("--json", action="store_true", help="print a list of objects, or one of such lists")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf tree of your own, read first")
    add_base_results_dir(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables; return the exit code."""
    if args.all and args.what not in (None, _RUNS):
        raise UserError(f"--all is about runs: slipway list --all, not slipway list {args.what} --all")
    if args.all or args.what == _RUNS:
        from launcher.cli.list_runs import list_runs

        return list_runs(args.base_results_dir, everywhere=args.all, as_json=args.json)
    return _list_choices(args)


def _list_choices(args: argparse.Namespace) -> int:
    # Imported late: it composes configurations, and runs need none.
    from launcher.cli.list_choices import LISTS, print_choices

    names = [args.what] if args.what else _WITHOUT_NAME
    found: dict[str, list[dict[str, Any]]] = {name: list(LISTS[name](args.config_dir)) for name in names}
    if args.json:
        print(json.dumps(found[args.what] if args.what else found, indent=2))
    else:
        for index, (name, rows) in enumerate(found.items()):
            if index:
                print()
            print_choices(name, rows)
    errors = [row["error"] for rows in found.values() for row in rows if "error" in row]
    for error in errors:
        print(f"slipway: {error}", file=sys.stderr)
    return 1 if errors else 0
