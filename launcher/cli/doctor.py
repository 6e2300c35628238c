"""`slipway doctor`: examine this machine, the cluster and its nodes for everything that a launch needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from launcher.checks.findings import Finding, Severity
from launcher.cli.options import Verbs, add_option
from launcher.cli.requests import add_examining_verb, read_request
from launcher.doctor.report import lacking
from launcher.drafting import drafts
from launcher.errors import DONE, NOT_KNOWN, WENT_WRONG, UserError, escape
from launcher.estimates.values import count
from launcher.ui.tables import Cell, align, print_grid
from launcher.ui.terminal import open_console, print_json

_HELP = """\
Examine everything that a launch needs, and print one table: Slurm, Pyxis, Enroot and its directories, the
programs that make images, credentials (their registries, never the credentials), the GPUs' driver against the
image's CUDA, Python. The overrides describe the launch; without any it is the default one of the tree.
Nothing is written. With --nodes a job of a few seconds examines compute nodes as well.

examples:
  slipway doctor cluster=sandbox                  without containers, on the sandbox
  slipway doctor cluster=bcm --nodes 2            and on two compute nodes
  slipway doctor cluster=bcm container=/images/nemo.sqsh --nodes 2 cluster.partition=gpu
  slipway doctor cluster=bcm container=/images/nemo.sqsh --nodes 2 --start   and does it start there?
  slipway doctor --image nvcr.io#nvidia/nemo:25.07    does this machine's driver run it?
  slipway doctor --json | jq -r '.lines[] | select(.status != "ok") | "\\(.what): \\(.fix)"'

ok: as it should be; warning: it works, within limits; missing: it is not there, or does not work;
unknown: nothing answered. `!` marks what the launch requires.

exit code:
  0  everything that the launch requires is there
  1  a requirement is missing
  2  a mistake in the arguments
  3  unknown: compute nodes did not answer
"""

_PATIENCE_SECONDS = 300.0
_MOST_PATIENCE_SECONDS = 7 * 86400.0
_SHOWN_NODES = 3


def add_parser(verbs: Verbs) -> None:
    parser = add_examining_verb(verbs, "doctor", run, _HELP)
    add_option(parser, "--nodes N", "examine N compute nodes, by a job", default=0)
    message = "with --nodes: start the launch's image there, through Pyxis; that may take minutes"
    add_option(parser, "--start", message)
    add_option(parser, "--image IMAGE", "examine this image instead of `container`")
    message = f"seconds to wait for the nodes (default: {_PATIENCE_SECONDS:g})"
    add_option(parser, "--patience SECONDS", message, type=float, default=_PATIENCE_SECONDS)


def run(args: argparse.Namespace) -> int:
    if args.nodes < 0:
        raise UserError(f"--nodes {args.nodes}: a number of nodes, from 1 on")
    if args.start and not args.nodes:
        raise UserError("--start: on which nodes?", hint="--nodes 1, or as many as a launch has")
    if not 0 < args.patience <= _MOST_PATIENCE_SECONDS:
        most = f"{_MOST_PATIENCE_SECONDS:.0f}"
        raise UserError(f"--patience {args.patience:g}: a number of seconds, above 0 and up to {most}")
    from launcher.doctor.examination import examine  # late, as it takes long

    # The other stages serve the last one.
    draft = drafts(read_request(args, args.overrides))[-1]
    where = f", and at {count(args.nodes, 'compute node')} by a job" if args.nodes else ""
    status = f"looking at this machine{where}"
    with open_console(stderr=True).status(status) if sys.stderr.isatty() else nullcontext():
        host, report = examine(
            draft, image=args.image, count=args.nodes, patience=args.patience, starts=args.start
        )
    missing = lacking(report)
    if args.json:
        print_json({"host": host, "ok": not missing, "lines": list(map(_content, report))})
    else:
        _print_table(report, has_nodes=args.nodes > 0)
        print(_summary(report, args.nodes))
    return WENT_WRONG if missing else NOT_KNOWN if lacking(report, Severity.UNKNOWN) else DONE


def _summary(report: Sequence[Finding], nodes: int) -> str:
    warnings = sum(line.severity == "warning" for line in report)
    more = f"; {count(warnings, 'warning')}" if warnings else ""
    for verdict, severity in (("missing", Severity.MISSING), ("unknown, and needed", Severity.UNKNOWN)):
        if lines := lacking(report, severity):
            names = ", ".join(dict.fromkeys(line.id for line in lines))
            return f"{verdict} for this launch: {names}{more}"
    where = "" if nodes else ", as far as can be seen from here"
    return f"nothing is missing for this launch{where}{more}"


def _content(line: Finding) -> dict[str, object]:
    return {
        "what": line.id,
        "status": line.severity,
        "needed": line.needed,
        "where": line.where,
        "found": line.message,
        "fix": line.fix,
        "free_bytes": line.free,
    }


_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "unknown": "magenta"}


def _print_table(report: Sequence[Finding], *, has_nodes: bool) -> None:
    """Print a table on a terminal; in a pipe a line for each thing, and one for its fix."""
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(report, has_nodes=has_nodes)))
        return
    from rich.text import Text

    rows: list[Sequence[Cell | Text]] = []
    for line in report:
        (what, *where, status), content, fix = _cells(line, has_nodes)
        text = Text(content)
        if fix is not None:
            text.append(f"\n→ {fix}", "cyan")
        rows.append((what, *where, (status, _STYLES[line.severity]), text))
    columns = ("what", *(["where"] if has_nodes else []), "status", "found, and what to do")
    print_grid(columns, rows, unfolded=(0, columns.index("status")))


def plain_lines(report: Sequence[Finding], *, has_nodes: bool) -> list[str]:
    rows = []
    for line in report:
        cells, text, fix = _cells(line, has_nodes)
        rows.append([*cells, text])
        if fix is not None:
            rows.append([*("" for _ in cells), f"-> {fix}"])
    return align(rows)


def _cells(line: Finding, has_nodes: bool) -> tuple[list[str], str, str | None]:
    """Return the narrow cells of a line, its text, and its remedy, unless all is well.

    An image's variables, and the errors of a tool, may hold control characters of a terminal.
    """
    where = ", ".join(line.where)
    if len(line.where) > _SHOWN_NODES:
        where = f"{', '.join(line.where[: _SHOWN_NODES - 1])}, ... ({len(line.where)})"
    mark = "!" if line.needed and line.severity in ("missing", "unknown") else ""
    room = "" if line.free is None else f"; {line.free / 2**30:,.1f} GiB free"
    fix = "\n".join(map(escape, line.fix.split("\n"))) if line.fix and line.severity != "ok" else None
    cells = [line.id, *([where] if has_nodes else []), f"{line.severity}{mark}"]
    return cells, f"{escape(line.message)}{room}", fix
