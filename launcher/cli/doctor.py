"""`slipway doctor`: examine this machine, the cluster and its nodes for everything that a launch needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from launcher.cli.options import Verbs, add_option
from launcher.cli.requests import add_examining_verb, request_of
from launcher.doctor.report import Row, lacking, unknown
from launcher.drafting import drafts
from launcher.errors import DONE, NOT_KNOWN, WENT_WRONG, UserError, one_line
from launcher.estimates.values import count
from launcher.ui.tables import Cell, align, print_grid
from launcher.ui.terminal import open_console, print_json

if TYPE_CHECKING:
    from rich.text import Text

_HELP = """\
Examine everything that a launch needs, and print one table: Slurm, Pyxis, Enroot and its directories, the
programs that make images, credentials (their registries, never the credentials), the GPUs' driver against the
image's CUDA, Python. The launch is the one that the overrides describe, and without any the one of the tree.
Nothing is written. With --nodes a job of a few seconds examines compute nodes as well.

examples:
  slipway doctor cluster=sandbox                  without containers, on the sandbox
  slipway doctor cluster=bcm --nodes 2            and on two compute nodes
  slipway doctor cluster=bcm container=/images/nemo.sqsh --nodes 2 cluster.partition=gpu
  slipway doctor cluster=bcm container=/images/nemo.sqsh --nodes 2 --start   and does it start there?
  slipway doctor --image nvcr.io#nvidia/nemo:25.07    does this machine's driver run it?
  slipway doctor --json | jq -r '.lines[] | select(.status != "ok") | "\\(.what): \\(.fix)"'

ok: as it should be; warning: it works, within limits; missing: it is not there, or does not work;
unknown: nothing answered. `!` marks what the launch cannot do without.

exit code:
  0  nothing that the launch cannot do without is missing
  1  something is
  2  a mistake in the arguments
  3  unknown: compute nodes did not answer
"""

_PATIENCE_SECONDS = 300.0
_MOST_PATIENCE_SECONDS = 7 * 86400.0
_SHOWN_NODES = 3


def add_parser(verbs: Verbs) -> None:
    text = "examine this machine, the cluster and its nodes for a launch"
    parser = add_examining_verb(verbs, "doctor", run, text, _HELP)
    add_option(parser, "--nodes N", "examine N compute nodes, by a job", default=0)
    message = "with --nodes: start the launch's image there, through Pyxis; that may take minutes"
    add_option(parser, "--start", message)
    add_option(parser, "--image IMAGE", "examine this image instead of `container`")
    message = f"wait so many seconds for the nodes (default: {_PATIENCE_SECONDS:g})"
    add_option(parser, "--patience SECONDS", message, type=float, default=_PATIENCE_SECONDS)


def run(args: argparse.Namespace) -> int:
    """Examine and print the report; return the exit code."""
    if args.nodes < 0:
        raise UserError(f"--nodes {args.nodes}: a number of nodes, from 1 on")
    if args.start and not args.nodes:
        raise UserError("--start: on which nodes?", hint="--nodes 1, or as many as a launch has")
    if not 0 < args.patience <= _MOST_PATIENCE_SECONDS:
        most = f"{_MOST_PATIENCE_SECONDS:.0f}"
        raise UserError(f"--patience {args.patience:g}: a number of seconds, above 0 and up to {most}")
    from launcher.doctor.examination import examine  # late, as it takes long

    # The other stages serve the last one.
    draft = drafts(request_of(args, args.overrides))[-1]
    where = f", and at {count(args.nodes, 'compute node')} by a job" if args.nodes else ""
    status = f"looking at this machine{where}"
    with open_console(stderr=True).status(status) if sys.stderr.isatty() else nullcontext():
        gathered, report = examine(
            draft, image=args.image, count=args.nodes, patience=args.patience, starts=args.start
        )
    missing, unanswered = lacking(report), unknown(report)
    if args.json:
        print_json(_content(report, missing, gathered.here.host))
    else:
        _print_table(report, has_nodes=args.nodes > 0)
        print(_summary(report, missing, unanswered, nodes=args.nodes))
    return WENT_WRONG if missing else NOT_KNOWN if unanswered else DONE


def _summary(report: Sequence[Row], missing: Sequence[Row], unanswered: Sequence[Row], *, nodes: int) -> str:
    warnings = sum(row.line.status == "warning" for row in report)
    more = f"; {count(warnings, 'warning')}" if warnings else ""
    for verdict, rows in (("missing", missing), ("unknown, and needed", unanswered)):
        if rows:
            names = ", ".join(dict.fromkeys(row.line.what for row in rows))
            return f"{verdict} for this launch: {names}{more}"
    where = "" if nodes else ", as far as can be seen from here"
    return f"nothing is missing for this launch{where}{more}"


def _content(report: Sequence[Row], missing: Sequence[Row], host: str) -> dict[str, object]:
    lines = [
        {
            "what": row.line.what,
            "status": str(row.line.status),
            "needed": row.line.needed,
            "where": list(row.where),
            "found": row.line.found,
            "fix": row.line.fix,
            "free_bytes": row.line.free,
        }
        for row in report
    ]
    return {"host": host, "ok": not missing, "lines": lines}


_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "unknown": "magenta"}


def _print_table(report: Sequence[Row], *, has_nodes: bool) -> None:
    """Print a table on a terminal; in a pipe a line for each thing, and one for its fix."""
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(report, has_nodes=has_nodes)))
        return
    from rich.text import Text

    rows: list[Sequence[Cell | Text]] = []
    for row in report:
        what, *where, status = _cells(row, has_nodes)
        text = Text(_found(row))
        if (fix := _fix(row)) is not None:
            text.append(f"\n→ {fix}", "cyan")
        rows.append((what, *where, (status, _STYLES[row.line.status]), text))
    columns = ("what", *(["where"] if has_nodes else []), "status", "found, and what to do")
    print_grid(columns, rows, unfolded=(0, columns.index("status")))


def plain_lines(report: Sequence[Row], *, has_nodes: bool) -> list[str]:
    """Return the lines of the report for a pipe."""
    rows = []
    for row in report:
        cells = _cells(row, has_nodes)
        rows.append([*cells, _found(row)])
        if (fix := _fix(row)) is not None:
            rows.append([*("" for _ in cells), f"-> {fix}"])
    return align(rows)


def _cells(row: Row, has_nodes: bool) -> list[str]:
    line, where = row.line, ", ".join(row.where)
    if len(row.where) > _SHOWN_NODES:
        where = f"{', '.join(row.where[: _SHOWN_NODES - 1])}, ... ({len(row.where)})"
    mark = "!" if line.needed and line.status in ("missing", "unknown") else ""
    return [line.what, *([where] if has_nodes else []), f"{line.status}{mark}"]


def _found(row: Row) -> str:
    # An image's variables, and the errors of a tool, may hold control characters of a terminal.
    text, free = one_line(row.line.found), row.line.free
    return text if free is None else f"{text}; {free / 2**30:,.1f} GiB free"


def _fix(row: Row) -> str | None:
    """Return the remedy, unless all is well."""
    line = row.line
    if not line.fix or line.status == "ok":
        return None
    return "\n".join(map(one_line, line.fix.split("\n")))
