"""`slipway nodes`: how often nodes failed, and the file of nodes that a team avoids."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.options import Verbs, add_option, add_verb, parse_age
from launcher.cli.runs import RUNS_HELP, add_base_results_dir, find_all
from launcher.errors import UserError, escape, shortened
from launcher.jobs.launches import Launch, readable_launches
from launcher.jobs.locator import RunLocator, originals
from launcher.runs.provenance import format_now, host, user
from launcher.ui.tables import UNKNOWN, Cell, count, moment, print_listing
from launcher.ui.terminal import print_json, print_message, print_stderr
from slipway.common.node.excluded import ExcludedNode, format_excluded, is_node_name, read_exclude_file

if TYPE_CHECKING:
    from launcher.monitor.node_failures import NodeRecord

_HELP = """\
Show how often each node failed under the jobs of all known runs, the worst first; or keep the file of nodes
that a team avoids, which resilience.exclude_file names.

A failure is an end at which the job blamed a node, or in which a rank of the node failed first; ends that
somebody asked for and mistakes of the program are no failures of nodes. The rate is by day of use, with its
90 % interval. A node is `worse` if it fails more often than all others together, beyond chance.

examples:
  slipway nodes                                     all known runs, since they began
  slipway nodes --since 30d gpt3_5b llama_7b        two runs, in the last 30 days
  slipway nodes --exclude-file /shared/bad_nodes.tsv          also what the team avoids
  slipway nodes --exclude n17 --why "Xid 79" --for 7d --exclude-file /shared/bad_nodes.tsv
  slipway nodes --exclude n17 --why "new GPU" --for 0d --exclude-file /shared/bad_nodes.tsv    use it again
  slipway nodes --json | jq -r '.[] | select(.above_others) | .node'

exit code:
  0  shown, or the file was written
  2  a mistake in the command line, or a file that cannot be read or written
"""

_COLUMNS = (
    *("NODE", "DAYS", "FAILURES", "PER DAY", "90 % INTERVAL", "VERDICT", "LAST", "REASONS"),
    "EXCLUDED",
)
_FOREVER = 99_999_999_999  # the year 5138


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "nodes", run, text=_HELP)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS_HELP}; default: all known runs")
    add_option(parser, "--since AGE", "only what happened in that time, such as 30d, 12h, 2w")
    add_option(parser, "--json", "print a list of objects")
    add_base_results_dir(parser)
    file = parser.add_argument_group("the file of nodes that a team avoids")
    add_option(file, "--exclude-file FILE", "the file; without more it is shown beside the failures")
    add_option(file, "--exclude NODE", "add a node; may be given again", action="append", default=[])
    add_option(file, "--why TEXT", "the reason, for the others")
    add_option(file, "--for AGE", "for how long (default: for good); 0d lets it be used again", dest="age")


def run(args: argparse.Namespace) -> int:
    # Imported late: --help needs none of it.
    from launcher.monitor.node_failures import count_node_failures

    now, path = time.time(), args.exclude_file
    since = 0.0 if args.since is None else now - parse_age(args.since, "--since")
    if args.exclude:
        until = _FOREVER if args.age is None else int(now + parse_age(args.age, "--for"))
        return _exclude(args, until)
    for option, value in (("--why", args.why), ("--for", args.age)):
        if value is not None:
            raise UserError(f"{option}: only with --exclude", hint="--exclude NODE")
    try:
        shared = {node.node: node for node in read_exclude_file(path, now)} if path is not None else {}
    except (OSError, ValueError) as error:
        raise _unusable(path, "read", error) from error
    records = count_node_failures(_launches(args.runs, args.base_results_dir), since)
    if args.json:
        fields = {name: node._asdict() for name, node in shared.items()}
        print_json([record.to_json() | {"excluded": fields.get(record.node)} for record in records])
    else:
        _print(records, shared)
    return 0


def _launches(words: Sequence[str], base: Path) -> Iterator[Launch]:
    if not words:
        yield from originals(RunLocator(base).launches())
    for run_dir in dict.fromkeys(ref.run_dir for ref in find_all(words, base)):
        yield from readable_launches(run_dir)


def _print(records: Sequence[NodeRecord], shared: Mapping[str, ExcludedNode]) -> None:
    columns = _COLUMNS if shared else _COLUMNS[:-1]
    rows = [_cells(record, shared.get(record.node))[: len(columns)] for record in records]
    if rows:
        print_listing(columns, rows, numbers=4, unfolded=(0, 4, 5, 6))
    else:
        print_stderr("no job of these runs has left marks of its nodes yet")
    for name in shared.keys() - {record.node for record in records}:
        print_message(f"{name} is excluded, and none of these runs used it: {_explain(shared[name])}")


def _cells(record: NodeRecord, excluded: ExcludedNode | None) -> list[Cell]:
    rates = [count(rate) if rate >= 10 else f"{rate:.2g}" for rate in record.rate or ()]
    reasons = (f"{number} × {shortened(reason)}" for reason, number in record.reasons.most_common())
    return [
        (record.node, "bold red" if record.is_above else "bold"),
        f"{record.days:.2f}",
        str(len(record.failures)),
        rates[0] if rates else UNKNOWN,
        "-".join(rates[1:]) or UNKNOWN,
        ("worse", "bold red") if record.is_above else UNKNOWN,
        moment(record.last),
        escape(", ".join(reasons)) or UNKNOWN,
        escape(_explain(excluded)) if excluded is not None else UNKNOWN,
    ]


# --- the file that a team shares


def _explain(node: ExcludedNode) -> str:
    until = "for good" if node.until >= _FOREVER else f"until {moment(node.until)}"
    return f"{until}: {node.why} ({node.job})"


def _unusable(path: Path, verb: str, error: OSError | ValueError) -> UserError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UserError(f"--exclude-file {escape(str(path))}: it cannot be {verb}: {why.lower()}")


def _exclude(args: argparse.Namespace, until: int) -> int:
    """Append a line for each node to the team's file."""
    first, path, why = args.exclude[0], args.exclude_file, args.why or ""
    odd = next((node for node in args.exclude if not is_node_name(node)), None)
    mistakes = (
        (
            args.runs,
            f"--exclude {first} {' '.join(args.runs)}: it takes no run",
            "--exclude NODE for each node",
        ),
        (path is None, f"--exclude {first}: which file?", "--exclude-file FILE"),
        (odd is not None, f"--exclude {odd}: not the name of one node", "--exclude n1 --exclude n2"),
        (not why.strip(), f"--exclude {first}: the others want to know the reason", "--why TEXT"),
    )
    for is_wrong, message, hint in mistakes:
        if is_wrong:
            raise UserError(escape(message), hint=hint)
    author = f"{user()}@{host()} {format_now()}"
    entries = [ExcludedNode(node, until, author, why) for node in args.exclude]
    try:
        _append(path, "".join(f"{format_excluded(entry)}\n" for entry in entries))
    except OSError as error:
        raise _unusable(path, "written", error) from error
    for entry in entries:
        text = _explain(entry) if until > time.time() else f"no longer: {entry.why} ({entry.job})"
        print(escape(f"{entry.node} is excluded {text}"))
    print_stderr(f"launches read it with resilience.exclude_file={path.absolute()}")
    return 0


def _append(path: Path, lines: str) -> None:
    """Append lines in one write, under a lock: network file systems let two appends overwrite each other."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o666), "rb+", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX)
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        torn = file.read(1) not in (b"", b"\n")  # a writer was killed, or an editor left no end of line
        content = ("\n" * torn + lines).encode("utf-8", "surrogateescape")
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())
