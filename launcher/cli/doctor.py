"""`slipway doctor`: examine this machine, the cluster and its nodes for everything that a launch needs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.cli.requests import add_examining_verb, request_of
from launcher.errors import UserError, one_line
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from launcher.doctor.report import Row

_DESCRIPTION = """\
Examine everything that a launch needs, and print one table: Slurm, Pyxis, Enroot and its directories, the
programs that make images, credentials (their registries, never the credentials), the GPUs' driver against the
image's CUDA, Python. The launch is the one that the overrides describe, and without any the one of the tree.
Nothing is written. With --nodes a job of a few seconds examines compute nodes as well."""

_EPILOG = """\
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
_MISSING, _NOT_KNOWN = 1, 3
_SHOWN_NODES = 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_examining_verb(
        subparsers,
        "doctor",
        run,
        help="examine this machine, the cluster and its nodes for a launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--nodes", type=int, default=0, metavar="N", help="examine N compute nodes, by a job")
    message = "with --nodes: start the launch's image there, through Pyxis; that may take minutes"
    parser.add_argument("--start", action="store_true", help=message)
    parser.add_argument("--image", metavar="IMAGE", help="examine this image instead of `container`")
    message = f"wait so many seconds for the nodes (default: {_PATIENCE_SECONDS:g})"
    parser.add_argument("--patience", type=float, default=_PATIENCE_SECONDS, metavar="SECONDS", help=message)


def run(args: argparse.Namespace) -> int:
    """Examine and print the report; return the exit code."""
    if args.nodes < 0:
        raise UserError(f"--nodes {args.nodes}: a number of nodes, from 1 on")
    if args.start and not args.nodes:
        raise UserError("--start: on which nodes?", hint="--nodes 1, or as many as a launch has")
    if not 0 < args.patience <= _MOST_PATIENCE_SECONDS:
        most = f"{_MOST_PATIENCE_SECONDS:.0f}"
        raise UserError(f"--patience {args.patience:g}: a number of seconds, above 0 and up to {most}")
    from launcher.doctor.examination import examine
    from launcher.doctor.report import lacking, unknown
    from launcher.drafting import drafts

    # The other stages serve the last one.
    draft = drafts(request_of(args, args.overrides))[-1]
    with _waiting(args.nodes):
        gathered, report = examine(
            draft, image=args.image, count=args.nodes, patience=args.patience, starts=args.start
        )
    missing, unanswered = lacking(report), unknown(report)
    if args.json:
        print(json.dumps(_content(report, gathered.here.host), indent=2))
    else:
        _print_table(report, has_nodes=args.nodes > 0)
        print(_summary(report, missing, unanswered, nodes=args.nodes))
    if missing:
        return _MISSING
    return _NOT_KNOWN if unanswered else 0


@contextmanager
def _waiting(count: int) -> Iterator[None]:
    """Show a status line on a terminal while the examination runs."""
    if not sys.stderr.isatty():
        yield
        return
    nodes = f", and at {count} compute {'node' if count == 1 else 'nodes'} by a job" if count else ""
    with open_console(stderr=True).status(f"looking at this machine{nodes}"):
        yield


def _summary(report: Sequence[Row], missing: Sequence[Row], unanswered: Sequence[Row], *, nodes: int) -> str:
    warnings = sum(row.line.status == "warning" for row in report)
    more = f"; {warnings} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    if missing:
        names = ", ".join(dict.fromkeys(row.line.what for row in missing))
        return f"missing for this launch: {names}{more}"
    if unanswered:
        names = ", ".join(dict.fromkeys(row.line.what for row in unanswered))
        return f"unknown, and needed for this launch: {names}{more}"
    where = "" if nodes else ", as far as can be seen from here"
    return f"nothing is missing for this launch{where}{more}"


def _content(report: Sequence[Row], host: str) -> dict[str, object]:
    from launcher.doctor.report import lacking

    return {
        "host": host,
        "ok": not lacking(report),
        "lines": [
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
        ],
    }


_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "unknown": "magenta"}


def _print_table(report: Sequence[Row], *, has_nodes: bool) -> None:
    """Print a table on a terminal; in a pipe a line for each thing, and one for its fix."""
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(report, has_nodes=has_nodes)))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("what", no_wrap=True)
    if has_nodes:
        grid.add_column("where", overflow="fold")
    grid.add_column("status", no_wrap=True)
    grid.add_column("found, and what to do", overflow="fold")
    for row in report:
        line = row.line
        text = Text(_found(row))
        if (fix := _fix(row)) is not None:
            text.append(f"\n→ {fix}", "cyan")
        cells = [Text(line.what, "bold"), Text(_status(row), _STYLES[line.status]), text]
        if has_nodes:
            cells.insert(1, Text(_where(row)))
        grid.add_row(*cells)
    open_console().print(grid)


def plain_lines(report: Sequence[Row], *, has_nodes: bool) -> Iterator[str]:
    """Yield the lines of the report for a pipe."""
    widths = [
        max(map(len, column)) for column in zip(*(_cells(row, has_nodes) for row in report), strict=True)
    ]
    for row in report:
        cells = zip(_cells(row, has_nodes), widths, strict=True)
        yield "  ".join([*(cell.ljust(width) for cell, width in cells), _found(row)]).rstrip()
        if (fix := _fix(row)) is not None:
            yield f"{' ' * (sum(widths) + 2 * len(widths))}-> {fix}"


def _cells(row: Row, has_nodes: bool) -> list[str]:
    return [row.line.what, *([_where(row)] if has_nodes else []), _status(row)]


def _status(row: Row) -> str:
    line = row.line
    return f"{line.status}!" if line.needed and line.status in ("missing", "unknown") else str(line.status)


def _where(row: Row) -> str:
    if len(row.where) <= _SHOWN_NODES:
        return ", ".join(row.where)
    return f"{', '.join(row.where[: _SHOWN_NODES - 1])}, ... ({len(row.where)})"


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
