"""Watching the status of many runs until all have ended: on the whole screen, or a line for each change."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import escape
from launcher.monitor.polling import Poller, backoff
from launcher.monitor.run_status import StatusRow, as_table, state_words
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.tables import colour, print_table, reasons, rich_table
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console, Group


# A state is out of date after this many unanswered questions, and at least this many seconds.
_STALE_QUESTIONS = 3
_STALE_SECONDS = 20.0


@dataclass(frozen=True)
class Snapshot:
    """The newest known status of the launches.

    `silent` is the seconds since a scheduler last answered, ``None`` while it answers, and `why` its error.
    `is_over` is True if there is nothing more to wait for.
    """

    rows: Sequence[StatusRow]
    silent: float | None
    why: str | None
    is_over: bool

    @property
    def states(self) -> list[State]:
        return [row.state for row in self.rows]


class StatusPoller(Poller[Sequence[StatusRow]]):
    """The status of runs, polled every `interval` seconds, less often while the scheduler does not answer.

    Use it as a context. Without an answer the last known facts of a job stay, but its state is UNKNOWN: a
    display that cannot see must not look healthy. Watching is given up after `patience` seconds without the
    state of any live job, and after `blind_patience` without an answer: a controller that is restarted takes
    minutes.
    """

    def __init__(
        self,
        collect: Callable[[], Sequence[StatusRow]],
        interval: float,
        patience: float = 60.0,
        blind_patience: float = 600.0,
    ) -> None:
        self._collect = collect
        self._interval = interval
        self._patience, self._blind_patience = patience, blind_patience
        self._failures = 0
        # The times of the last answer, and of the last answer about a live job.
        self._answered = self._seen_live = time.monotonic()
        self._last: dict[Path, StatusRow] = {}
        super().__init__(self._collect_rows, lambda _: backoff(self._interval, self._failures))

    def snapshot(self) -> Snapshot:
        """Return what is known now."""
        newest = self.newest
        now = time.monotonic()
        age = now - self._answered
        is_old = age > max(_STALE_QUESTIONS * self._interval, _STALE_SECONDS)
        rows = [self._as_known(row, is_old) for row in newest]
        why = next((row.unanswered for row in newest if row.unanswered), None)
        is_silent = is_old or why is not None
        has_unfinished = any(not row.state.is_final for row in rows)
        given_up = age > self._blind_patience or (not is_silent and now - self._seen_live > self._patience)
        return Snapshot(rows, age if is_silent else None, why, not has_unfinished or given_up)

    def _collect_rows(self) -> Sequence[StatusRow]:
        rows = self._collect()
        now = time.monotonic()
        if any(row.unanswered for row in rows):
            self._failures, self._seen_live = self._failures + 1, now
        else:
            self._failures, self._answered = 0, now
        known = [row for row in rows if row.state is not State.UNKNOWN]
        self._last |= {_directory(row): row for row in known}
        if any(row.state.is_live for row in known):
            self._seen_live = now
        return rows

    def _as_known(self, row: StatusRow, is_old: bool) -> StatusRow:
        last = self._last.get(_directory(row))
        is_unanswered = row.unanswered is not None or is_old
        if row.state.is_final or not is_unanswered or last is None:
            return row
        reason = f"no answer; before that {last.state.value}"
        elapsed = last.elapsed if last.state is not State.PENDING else None
        known = JobStatus(State.UNKNOWN, reason, last.nodes, elapsed, restarts=last.restarts)
        return replace(row, **known.values())


def _directory(row: StatusRow) -> Path:
    return row.launch.paths.directory if row.launch else row.run_dir


_REDRAW_SECONDS = 0.5
_MOST_REASONS = 6
_OTHER_LINES = 4  # the heading, the table's own, and the foot


def watch(poller: StatusPoller, interval: float, *, lines_of_json: bool = False) -> Snapshot:
    """Show the status of the runs until they have ended: redrawn on a terminal, else as lines."""
    if lines_of_json:
        return watch_in_lines(poller, lambda row: json.dumps(row.to_json()))
    return watch_on_screen(poller, interval) if sys.stdout.isatty() else watch_in_lines(poller, as_line)


def watch_in_lines(poller: StatusPoller, write: Callable[[StatusRow], str]) -> Snapshot:
    """Print a line for each launch, and again whenever its state, its reason or its nodes change."""
    printed: dict[Path, tuple[object, ...]] = {}
    with poller:
        while True:
            snapshot = poller.snapshot()
            for row in snapshot.rows:
                shown = (row.state, row.reason, row.nodes, row.restarts, str(row.chain))
                if printed.get(_directory(row)) != shown:
                    printed[_directory(row)] = shown
                    print(write(row), flush=True)
            if snapshot.is_over:
                return snapshot
            time.sleep(_REDRAW_SECONDS)


def as_line(row: StatusRow) -> str:
    """Return a change as a line for people."""
    progress = row.progress
    parts = [time.strftime("%H:%M:%S"), row.run, *state_words(row.launch, row)]
    if progress.step is not None:
        parts.append(f"step {tables.steps(progress.step, progress.max_steps)}")
    if progress.loss is not None:
        parts.append(f"loss {tables.loss(progress.loss)}")
    return escape("  ".join(parts))


def watch_on_screen(poller: StatusPoller, interval: float) -> Snapshot:
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
        print_table(*as_table(snapshot.rows), snapshot.states)
    return snapshot


def draw(snapshot: Snapshot, console: Console, interval: float) -> Group:
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
    table = rich_table(*as_table(rows), [row.state for row in rows], console.width)
    hidden = len(snapshot.rows) - len(rows)
    parts = [Text(f"  and {hidden} more", "dim")] if hidden else []
    foot = Text(f"every {interval:g} s; Ctrl-C stops watching, not the jobs", "dim")
    for line in (head, *below, foot):
        line.truncate(console.width, overflow="ellipsis")
    return Group(head, table, *parts, *below, foot)
