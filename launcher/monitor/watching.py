"""What is known of many runs while they are watched: the newest look, and how old it is."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from launcher.errors import one_line
from launcher.monitor.polling import Poller, backoff
from launcher.monitor.run_status import RunStatus, as_table
from launcher.schedulers.base import JobStatus, State
from launcher.ui import formatting
from launcher.ui.tables import colour, print_table, reasons, rich_table
from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text


# A state that old is believed no longer, in questions that should have been answered.
_STALE_QUESTIONS = 3
_STALE_SECONDS = 20.0
# For how long nothing may be told of what has not ended before the watching is given up: by a scheduler that
# answers, and by one that does not (a controller that is restarted takes minutes), in seconds.
PATIENCE = 60.0
BLIND_PATIENCE = 600.0


@dataclass(frozen=True)
class Snapshot:
    """The launches as they are known now.

    `silent` is for how many seconds no scheduler has answered, ``None`` while they answer, and `why` its
    words. `is_over` tells that there is nothing more to wait for.
    """

    rows: Sequence[RunStatus]
    silent: float | None
    why: str | None
    is_over: bool

    @property
    def states(self) -> list[State]:
        return [row.status.state for row in self.rows]


class StatusPoller:
    """Looks at runs every `interval` seconds, more seldom while the scheduler does not answer.

    Use it as a context. What was last known of a job stays, but its state is UNKNOWN: a board that cannot see
    does not look healthy.

    Parameters
    ----------
    collect_status
        Looks at the runs once.
    """

    def __init__(
        self,
        collect_status: Callable[[], Sequence[RunStatus]],
        interval: float,
        patience: float = PATIENCE,
        blind_patience: float = BLIND_PATIENCE,
    ) -> None:
        self._survey = collect_status
        self._interval = interval
        self._patience, self._blind_patience = patience, blind_patience
        self._failures = 0
        self._heard = self._told = time.monotonic()
        self._last: dict[Path, RunStatus] = {}
        self._poller = Poller(self._ask, lambda _: backoff(self._interval, self._failures))

    def __enter__(self) -> Self:
        self._poller.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._poller.__exit__(kind, error, trace)

    def look(self) -> Snapshot:
        """What is known now."""
        newest = self._poller.newest
        now = time.monotonic()
        age = now - self._heard
        is_old = age > max(_STALE_QUESTIONS * self._interval, _STALE_SECONDS)
        rows = [self._as_known(row, is_old) for row in newest]
        why = next((row.unanswered for row in newest if row.unanswered), None)
        is_silent = is_old or why is not None
        waits = [row for row in rows if not row.status.state.is_final]
        given_up = age > self._blind_patience or (not is_silent and now - self._told > self._patience)
        return Snapshot(rows, age if is_silent else None, why, not waits or given_up)

    def _ask(self) -> Sequence[RunStatus]:
        rows = self._survey()
        now = time.monotonic()
        if any(row.unanswered for row in rows):
            self._failures, self._told = self._failures + 1, now
        else:
            self._failures, self._heard = 0, now
        told = [row for row in rows if row.status.state is not State.UNKNOWN]
        self._last |= {_place(row): row for row in told}
        if any(row.status.state.is_live for row in told):
            self._told = now
        return rows

    def _as_known(self, row: RunStatus, is_old: bool) -> RunStatus:
        last = self._last.get(_place(row))
        unheard = row.unanswered is not None or is_old
        if row.status.state.is_final or not unheard or last is None:
            return row
        was = last.status
        silent = f"no answer; before that {was.state.value}"
        elapsed = was.elapsed if was.state is not State.PENDING else None
        known = JobStatus(State.UNKNOWN, silent, was.nodes, elapsed, restarts=was.restarts)
        return replace(row, status=known)


def _place(row: RunStatus) -> Path:
    return row.launch.paths.directory if row.launch else row.run_dir


_REDRAW_SECONDS = 0.5
_MOST_REASONS = 6
_OTHER_LINES = 4  # the heading, the table's own, and the foot


def watch(board: StatusPoller, interval: float, *, lines_of_json: bool = False) -> Snapshot:
    """Show a board in the way that fits where it is shown."""
    if lines_of_json:
        return watch_in_lines(board, as_json)
    return watch_on_screen(board, interval) if sys.stdout.isatty() else watch_in_lines(board, as_line)


def watch_in_lines(board: StatusPoller, write: Callable[[RunStatus], str]) -> Snapshot:
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


def as_line(row: RunStatus) -> str:
    """A change for people."""
    status, progress = row.status, row.progress
    link = f" (link {status.chain})" if status.chain else ""
    parts = [
        time.strftime("%H:%M:%S"),
        row.run,
        f"job {row.launch.job_in(status)}{link}" if row.launch else "",
    ]
    parts.append(status.state.value + (f" ({status.reasons})" if status.reasons else ""))
    if status.nodes and not status.state.is_final:
        parts.append(f"on {status.nodes}")
    if status.elapsed and status.state.is_final:
        parts.append(f"after {status.elapsed}")
    if progress.step is not None:
        parts.append(f"step {formatting.steps(progress.step, progress.max_steps)}")
    if progress.loss is not None:
        parts.append(f"loss {formatting.loss(progress.loss)}")
    return one_line("  ".join(part for part in parts if part))


def as_json(row: RunStatus) -> str:
    """A change for programs: one line."""
    return json.dumps(row.to_json())


def watch_on_screen(board: StatusPoller, interval: float) -> Snapshot:
    """Redraw a table on the whole screen; the last look stays on the terminal when it is left."""
    from rich.live import Live

    terminal = open_console()
    look = board.look()
    # The heading tells that nobody answers; a line of its own would tear the screen.
    logging.getLogger("launcher.schedulers").setLevel(logging.ERROR)
    try:
        with board, Live(console=terminal, screen=True, auto_refresh=False) as live:
            while not look.is_over:
                live.update(draw(look, terminal, interval), refresh=True)
                time.sleep(_REDRAW_SECONDS)
                look = board.look()
    finally:
        print_table(*as_table(look.rows), look.states)
    return look


def draw(look: Snapshot, console: Console, interval: float) -> Group:
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


def _heading(look: Snapshot) -> Text:
    from rich.text import Text

    counts = Counter(sorted(look.states, key=lambda state: state.is_final))
    head = Text.assemble((time.strftime("%H:%M:%S"), "dim"), "  ")
    if look.silent is not None:
        why = f": {look.why}" if look.why else ""
        head.append(f"no answer for {look.silent:.0f} s{why}  ", "bold magenta")
    for state, count in counts.items():
        head.append(f"{count} {state.value}  ", colour(state))
    return head


def _most_important(rows: Sequence[RunStatus], room: int) -> list[RunStatus]:
    chosen = sorted(range(len(rows)), key=lambda index: rows[index].status.state.is_final)[: max(room, 1)]
    return [rows[index] for index in sorted(chosen)]


def _launch(row: RunStatus) -> int | None:
    return row.launch.paths.number if row.launch else None


def _seen(row: RunStatus) -> tuple[object, ...]:
    status = row.status
    return status.state, status.reason, status.nodes, status.restarts, str(status.chain)
