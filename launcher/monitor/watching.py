"""Watching the status of many runs until all have ended: on the whole screen, or a line for each change."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import escape
from launcher.monitor.polling import Snapshot, StatusPoller
from launcher.monitor.run_status import StatusRow, make_table, state_words
from launcher.ui import tables
from launcher.ui.tables import colour, print_table, reasons, rich_table
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console, Group


_REDRAW_SECONDS = 0.5
_MOST_REASONS = 6
_OTHER_LINES = 4  # the heading, the table's own, and the foot


def watch(
    poller: StatusPoller[StatusRow], interval: float, *, lines_of_json: bool = False
) -> Snapshot[StatusRow]:
    """Show the status of the runs until they have ended: redrawn on a terminal, else as lines."""
    if lines_of_json:
        return watch_in_lines(poller, lambda row: json.dumps(row.to_json()))
    return watch_on_screen(poller, interval) if sys.stdout.isatty() else watch_in_lines(poller, format_line)


def watch_in_lines(poller: StatusPoller[StatusRow], write: Callable[[StatusRow], str]) -> Snapshot[StatusRow]:
    """Print a line for each launch, and again when its state, reason or nodes change, or it falls silent."""
    printed: dict[Path, tuple[object, ...]] = {}
    with poller:
        while True:
            snapshot = poller.snapshot()
            for row in snapshot.rows:
                is_silent = row.silence is not None
                shown = (row.state, row.reason, row.nodes, row.restarts, str(row.chain), is_silent)
                if printed.get(row.directory) != shown:
                    printed[row.directory] = shown
                    print(write(row), flush=True)
            if snapshot.is_over:
                return snapshot
            time.sleep(_REDRAW_SECONDS)


def format_line(row: StatusRow) -> str:
    """Return a change as a line for people."""
    progress = row.progress
    parts = [time.strftime("%H:%M:%S"), row.run, *state_words(row.launch, row)]
    if progress.step is not None:
        parts.append(f"step {tables.steps(progress.step, progress.max_steps)}")
    if progress.loss is not None:
        parts.append(f"loss {tables.loss(progress.loss)}")
    return escape("  ".join(parts))


def watch_on_screen(poller: StatusPoller[StatusRow], interval: float) -> Snapshot[StatusRow]:
    """Redraw a table on the whole screen; the last one stays on the terminal."""
    from rich.live import Live

    terminal = open_console()
    snapshot = poller.snapshot()
    # The heading shows that the scheduler does not answer; a logged line would tear the screen.
    logging.getLogger("launcher.slurm").setLevel(logging.ERROR)
    try:
        with poller, Live(console=terminal, screen=True, auto_refresh=False) as live:
            while not snapshot.is_over:
                live.update(draw(snapshot, terminal, interval), refresh=True)
                time.sleep(_REDRAW_SECONDS)
                snapshot = poller.snapshot()
    finally:
        print_table(*make_table(snapshot.rows), snapshot.states)
    return snapshot


def draw(snapshot: Snapshot[StatusRow], console: Console, interval: float) -> Group:
    """Draw the table and the reasons; of more launches than fit, those that have not ended come first."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble((time.strftime("%H:%M:%S"), "dim"), "  ")
    if snapshot.silent is not None:
        why = f": {snapshot.why}" if snapshot.why else ""
        head.append(f"no answer for {snapshot.silent:.0f} s{why}  ", "bold magenta")
    for state, count in Counter(sorted(snapshot.states, key=lambda state: state.is_final)).items():
        head.append(f"{count} {state.value}  ", colour(state))
    live_first = sorted(snapshot.rows, key=lambda row: row.state.is_final)
    cells = [list(row.cells().values()) for row in live_first]
    below = reasons(cells, [row.state for row in live_first])[:_MOST_REASONS]
    room = max(console.height - len(below) - _OTHER_LINES, 2)
    # Those that fit, in the order of all.
    kept = {id(row) for row in (live_first if len(live_first) <= room else live_first[: room - 1])}
    rows = [row for row in snapshot.rows if id(row) in kept]
    table = rich_table(*make_table(rows), [row.state for row in rows], console.width)
    hidden = len(snapshot.rows) - len(rows)
    parts = [Text(f"  and {hidden} more", "dim")] if hidden else []
    foot = Text(f"asks every {interval:g} s; Ctrl-C stops watching, not the jobs", "dim")
    for line in (head, *below, foot):
        line.truncate(console.width, overflow="ellipsis")
    return Group(head, table, *parts, *below, foot)
