"""How far long work on images is: a bar with rate and remaining time, or lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """What work tells of itself."""

    def step(self, name: str, total: int | None = None) -> None:
        """Begin a step, which ends the one before; `total` is its bytes where they are known."""

    def advance(self, done: int, total: int | None = None) -> None:
        """Tell how many bytes of the step are done so far, and how many there are if that is new."""

    def note(self, text: str) -> None:
        """Tell something that stays to be read."""

    def done(self) -> None:
        """End the last step."""


class Silent:
    """Tells nothing."""

    def step(self, name: str, total: int | None = None) -> None:
        pass

    def advance(self, done: int, total: int | None = None) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def done(self) -> None:
        pass


class Plain(Silent):
    """A line for each step and each note: in a pipe nothing moves."""

    def step(self, name: str, total: int | None = None) -> None:
        size = f" ({megabytes(total)})" if total else ""
        print(f"{name}{size} ...", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars:
    """A bar on the terminal for each step, with its rate and the time that it will still take."""

    def __init__(self, live: RichProgress) -> None:
        self._live = live
        self._task: TaskID | None = None

    def step(self, name: str, total: int | None = None) -> None:
        self.done()
        self._task = self._live.add_task(name, total=total, amount=_amount(0, total))

    def advance(self, done: int, total: int | None = None) -> None:
        if self._task is not None:
            # An estimate may be too low; a bar beyond its end says nothing.
            known = total if total is not None else self._live.tasks[-1].total
            bound = max(known, done) if known is not None else None
            self._live.update(self._task, completed=done, total=bound, amount=_amount(done, bound))

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def done(self) -> None:
        if self._task is None:
            return
        task = self._live.tasks[-1]
        amount = task.total or task.completed
        shown = _amount(amount, amount) if amount else ""
        self._live.update(self._task, completed=amount, total=amount, amount=shown)
        self._live.stop_task(self._task)
        self._task = None


def _amount(done: float, total: float | None) -> str:
    if not total:
        return megabytes(done) if done else ""
    return f"{megabytes(done)} of {megabytes(total)}"


@contextmanager
def told(quiet: bool = False) -> Iterator[Progress]:
    """The progress for this process's stderr: bars on a terminal, lines anywhere else."""
    if quiet:
        yield Silent()
        return
    if not sys.stderr.isatty():
        yield Plain()
        return
    with bars_on(open_console(stderr=True)) as bars:
        yield bars


@contextmanager
def bars_on(console: Console, clock: Callable[[], float] | None = None) -> Iterator[Bars]:
    """Bars on a terminal; the clock is another's in tests."""
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Rate(ProgressColumn):
        """Of the last seconds; at the end that of the whole step."""

        def render(self, task: Task) -> Text:
            speed = task.completed / task.elapsed if task.finished and task.elapsed else task.speed
            return Text(f"{megabytes(speed)}/s" if speed else "")

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with RichProgress(*columns, console=console, get_time=clock) as live:
        bars = Bars(live)
        yield bars
        bars.done()


def megabytes(size: float) -> str:
    """A size as people read it, in powers of ten: 950 kB, 12.3 MB, 21 GB."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one * 0.9995:
            number = size / one
            return f"{number:.{1 if number < 99.95 else 0}f} {unit}"
    return f"{int(size)} B"
