"""Showing a board until all that is watched has ended: on the whole screen, or a line for each change."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launcher.errors import one_line
from launcher.monitor import formatting
from launcher.monitor.board import Board, Look
from launcher.monitor.overview import StatusRow, as_table
from launcher.monitor.tables import colour, print_table, reasons, rich_table
from launcher.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

_REDRAW_SECONDS = 0.5
_MOST_REASONS = 6
_OTHER_LINES = 4  # the heading, the table's own, and the foot


def watch(board: Board, interval: float, *, lines_of_json: bool = False) -> Look:
    """Show a board in the way that fits where it is shown."""
    if lines_of_json:
        return watch_in_lines(board, as_json)
    return watch_on_screen(board, interval) if sys.stdout.isatty() else watch_in_lines(board, as_line)


def watch_in_lines(board: Board, write: Callable[[StatusRow], str]) -> Look:
    """Print a line for each launch, and again whenever its state, its reason or its nodes change."""
    told: dict[str, tuple[object, ...]] = {}
    with board:
        while True:
            look = board.look()
            for row in look.rows:
                key, seen = f"{row.run_dir}/{_launch(row)}", _seen(row)
                if told.get(key) != seen:
                    told[key] = seen
                    print(write(row), flush=True)
            if look.is_over:
                return look
            time.sleep(_REDRAW_SECONDS)


def as_line(row: StatusRow) -> str:
    """A change for people."""
    status, progress = row.status, row.progress
    link = f" (link {status.chain})" if status.chain else ""
    parts = [
        time.strftime("%H:%M:%S"),
        row.run,
        f"job {row.launch.job_in(status)}{link}" if row.launch else "",
    ]
    parts.append(status.state.value + (f" ({status.full_reason})" if status.full_reason else ""))
    if status.nodes and not status.state.is_final:
        parts.append(f"on {status.nodes}")
    if status.elapsed and status.state.is_final:
        parts.append(f"after {status.elapsed}")
    if progress.step is not None:
        parts.append(f"step {formatting.steps(progress.step, progress.max_steps)}")
    if progress.loss is not None:
        parts.append(f"loss {formatting.loss(progress.loss)}")
    return one_line("  ".join(part for part in parts if part))


def as_json(row: StatusRow) -> str:
    """A change for programs: one line."""
    return json.dumps(row.to_json())


def watch_on_screen(board: Board, interval: float) -> Look:
    """Redraw a table on the whole screen; the last look stays on the terminal when it is left."""
    from rich.live import Live

    terminal = open_console()
    look = board.look()
    # The heading tells that nobody answers; a line of its own would tear the screen.
    logging.getLogger("launcher.slurm").setLevel(logging.ERROR)
    try:
        with board, Live(console=terminal, screen=True, auto_refresh=False) as live:
            while not look.is_over:
                live.update(draw(look, terminal, interval), refresh=True)
                time.sleep(_REDRAW_SECONDS)
                look = board.look()
    finally:
        print_table(*as_table(look.rows), look.states)
    return look


def draw(look: Look, console: Console, interval: float) -> Group:
    """Fill the screen with what is most worth knowing: what has not ended comes first where not all fits."""
    from rich.console import Group
    from rich.text import Text

    head = _heading(look)
    going_first = sorted(look.rows, key=lambda row: row.status.state.is_final)
    cells, states = [row.cells() for row in going_first], [row.status.state for row in going_first]
    below = reasons(cells, states)[:_MOST_REASONS]
    room = max(console.height - len(below) - _OTHER_LINES, 2)
    rows = look.rows if len(look.rows) <= room else _most_important(look.rows, room - 1)
    table = rich_table(*as_table(rows), [row.status.state for row in rows], console.width)
    hidden = len(look.rows) - len(rows)
    parts: list[Text] = [Text(f"  and {hidden} more", "dim")] if hidden else []
    foot = Text(f"every {interval:g} s; Ctrl-C ends the watching, not the jobs", "dim")
    for line in (head, *below, foot):
        line.truncate(console.width, overflow="ellipsis")
    return Group(head, table, *parts, *below, foot)


def _heading(look: Look) -> Text:
    from rich.text import Text

    counts = Counter(sorted(look.states, key=lambda state: state.is_final))
    head = Text.assemble((time.strftime("%H:%M:%S"), "dim"), "  ")
    if look.silent is not None:
        why = f": {look.why}" if look.why else ""
        head.append(f"no answer for {look.silent:.0f} s{why}  ", "bold magenta")
    for state, count in counts.items():
        head.append(f"{count} {state.value}  ", colour(state))
    return head


def _most_important(rows: Sequence[StatusRow], room: int) -> list[StatusRow]:
    chosen = sorted(range(len(rows)), key=lambda index: rows[index].status.state.is_final)[: max(room, 1)]
    return [rows[index] for index in sorted(chosen)]


def _launch(row: StatusRow) -> int | None:
    return row.launch.paths.number if row.launch else None


def _seen(row: StatusRow) -> tuple[object, ...]:
    status = row.status
    return status.state, status.reason, status.nodes, status.restarts, str(status.chain)
