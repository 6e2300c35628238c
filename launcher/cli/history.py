"""`slipway history`: the launches of a run, and where the result of one comes from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from launcher.cli.runs import add_run, named_run
from launcher.errors import one_line
from launcher.exit_codes import DONE, NOT_KNOWN
from launcher.monitor.history import AttemptRow, LaunchRow, history
from launcher.slurm.states import State
from launcher.ui import formatting
from launcher.ui.formatting import moment

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.jobs.diagnosis import Diagnosis

_DESCRIPTION = """\
Tell what became of each launch of a run: a line for each, below it why it ended and which overrides differ
from those of the launch before. A requeued job has a line for each of its lives, an array for each task, a
chain for each link, with what became of it and why.

With --launch, or when RUN names a launch (its directory, a file in it, its job's id): where its result comes
from: its command and overrides, the commit and what was not committed, the image, versions, user and host.

examples:
  slipway history gpt3_126m               its launches
  slipway history gpt3_126m --launch 2    where the result of launch 2 comes from
  slipway history 4711                    of the launch that became job 4711
  slipway history gpt3_126m --json | jq -r '.[] | select(.git_dirty) | .launch'

COMMIT has a * where not all was committed; what was not is in the launch's git.diff. STEPS are the step from
which the launch began and the one to which it came, LOSS is its last training loss in nats.

exit code:
  0  told
  2  there is no such run or launch
  3  the state of some launch is UNKNOWN"""

_COLUMNS = (
    "LAUNCH", "JOB", "STATE", "LAUNCHED", "BY", "STARTED", "RAN", "NODES", "STEPS", "LOSS", "COMMIT",
)  # fmt: skip
_STATE = _COLUMNS.index("STATE")
# What a narrow terminal does without, the most dispensable first.
_DROPPED_FIRST = ("STARTED", "NODES", "BY", "RAN", "COMMIT", "LAUNCHED")
_GAP = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "history",
        help="the launches of a run, and where a result comes from",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a list of objects; of one launch an object"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the launches, or one; return the exit code."""
    chosen = named_run(args)
    if chosen.launch is not None:
        return _tell_origin(chosen.run_dir, chosen.launch, as_json=args.json)
    rows = history(chosen.run_dir)
    if args.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
    elif rows:
        _print(rows)
    else:
        print(f"the run in {one_line(str(chosen.run_dir))} has no launch yet", file=sys.stderr)
    return NOT_KNOWN if any(row.status.state is State.UNKNOWN for row in rows) else DONE


def _tell_origin(run_dir: Path, number: int, *, as_json: bool) -> int:
    # Imported late: the launches alone need none of it.
    from launcher.jobs.launches import open_launch
    from launcher.monitor.provenance_report import provenance, provenance_rows
    from launcher.ui.tables import print_pairs

    launch = open_launch(run_dir, number)
    if as_json:
        print(json.dumps(provenance(launch), indent=2))
    else:
        print_pairs(f"{launch.manifest.run}, launch {number}", provenance_rows(launch))
    return DONE


def _print(rows: Sequence[LaunchRow]) -> None:
    from launcher.ui.tables import print_styled

    table = [list(_COLUMNS)]
    states: list[State | None] = [None]
    below: list[list[str]] = [[]]
    for row in rows:
        table.append(_cells(row))
        states.append(row.status.state)
        below.append([])
        for life in row.lives:
            table.append(_life_cells(life))
            states.append(State.PENDING if life.state not in State.__members__ else State[life.state])
            below.append(_why(life))
        below[-1] += _told_below(row)
    print_styled(_lines(table, states, below))


def _lines(
    table: Sequence[Sequence[str]], states: Sequence[State | None], below: Sequence[Sequence[str]]
) -> Iterable[tuple[tuple[str, str], ...]]:
    """Aligned lines, with what is told below each, as text and its style."""
    from launcher.ui.tables import colour

    shown = _fitting(table)
    widths = {index: max(len(row[index]) for row in table) for index in shown}
    for row, state, further in zip(table, states, below, strict=True):
        parts = []
        for index in shown:
            style = "bold" if state is None else colour(state) if index == _STATE else ""
            gap = " " * (widths[index] - len(row[index]) + _GAP) if index != shown[-1] else ""
            parts += [(row[index], style), (gap, "")]
        while not parts[-1][0].strip():
            parts.pop()
        yield tuple(parts)
        for line in further:
            yield ((f"        {one_line(line)}", "dim"),)


def _fitting(table: Sequence[Sequence[str]]) -> list[int]:
    """The columns that say something and, on a terminal, that it has room for."""
    import shutil

    rows = table[1:]
    shown = [
        index
        for index, name in enumerate(_COLUMNS)
        if name in ("LAUNCH", "STATE") or any(row[index] not in ("", formatting.UNKNOWN) for row in rows)
    ]
    if not sys.stdout.isatty():
        return shown
    room = shutil.get_terminal_size().columns
    for name in ("", *_DROPPED_FIRST):
        shown = [index for index in shown if _COLUMNS[index] != name]
        if sum(max(len(row[index]) for row in table) + _GAP for index in shown) - _GAP <= room:
            break
    return shown


def _cells(row: LaunchRow) -> list[str]:
    manifest = row.launch.manifest if row.launch else None
    status = row.status
    values = [
        row.number,
        row.launch.job_in(status) if row.launch else None,
        status.state.value,
        moment(manifest.created if manifest else None),
        manifest.user if manifest else None,
        moment(row.started),
        status.elapsed,
        status.nodes,
        row.steps,
        formatting.loss(row.steps.loss),
        row.commit,
    ]
    return [one_line(formatting.text(value)) for value in values]


def _life_cells(row: AttemptRow) -> list[str]:
    life = row.life
    name = life.job_id if life.number == 0 else f"{life.job_id}, life {life.number + 1}"
    link = "" if row.link is None else f"link {row.link}"
    values = [
        link, name, row.state, "", "", moment(life.started), formatting.duration(row.elapsed), life.nodes,
        row.steps, formatting.loss(row.steps.loss), "",
    ]  # fmt: skip
    return [one_line(str(value)) if value == "" else one_line(formatting.text(value)) for value in values]


def _why(row: AttemptRow) -> list[str]:
    """Why a life ended and, of a link, where it was not to run."""
    avoided = [f"was not to run on {row.life.avoids}"] if row.life.avoids else []
    damaged = [one.line() for one in row.damaged]
    return [*avoided, *damaged, *_reasons(row.state, row.reason, row.reading)]


def _told_below(row: LaunchRow) -> list[str]:
    reason, last = row.status.reason, row.lives[-1] if row.lives else None
    if last is not None and last.link is None and reason == last.reason:
        reason = None  # it stands above
    if reason and last is not None and last.link is not None:
        reason = reason.removeprefix(last.reason or "").removeprefix("; ")  # it stands above
        if last.reading is not None and reason == last.reading.why:
            reason = None
    told = {one for life in row.lives for one in life.damaged}
    damaged = [one.line() for one in row.damaged if one not in told]
    differs = row.differs.lines() if row.differs else []
    return [*damaged, *_reasons(row.status.state.value, reason, row.reading), *differs, *row.changes.lines()]


def _reasons(state: str, reason: str | None, reading: Diagnosis | None) -> list[str]:
    if reading is None:
        return [reason] if reason else []
    first, *more = reading.lines()
    # That it saved is what the state says, too.
    return [f"{reason}; {first}" if reason and state != State.INTERRUPTED.value else first, *more]
