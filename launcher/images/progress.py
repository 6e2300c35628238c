"""Progress of work on images: bars with rate and remaining time on a terminal, lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class ImageProgress:
    """A listener to work on images; this one prints nothing."""

    def step(self, name: str, total: int | None = None) -> None:
        """Begin a step, which ends the one before; `total` is its bytes where they are known."""

    def advance(self, done: int) -> None:
        """Set how many bytes of the step are done."""

    def note(self, text: str) -> None:
        """Print a line that stays."""

    def done(self) -> None:
        """End the last step."""


SILENT = ImageProgress()


class LineProgress(ImageProgress):
    """One line for each step and each note, for a pipe."""

    def step(self, name: str, total: int | None = None) -> None:
        from rich.filesize import decimal  # `slipway check` imports this module, and needs no rich in a pipe

        size = f" ({decimal(total)})" if total else ""
        self.note(f"{name}{size} ...")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class BarProgress(ImageProgress):
    """One bar of rich for each step."""

    def __init__(self, live: Progress) -> None:
        self._live = live
        self._task: TaskID | None = None

    def step(self, name: str, total: int | None = None) -> None:
        self.done()
        self._task = self._live.add_task(name, total=total)

    def advance(self, done: int) -> None:
        if self._task is not None:
            # An estimate may be too low; a bar beyond its end says nothing.
            total = self._live.tasks[-1].total
            self._live.update(self._task, completed=done, total=max(total, done) if total else None)

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def done(self) -> None:
        if self._task is not None:
            amount = self._live.tasks[-1].total or self._live.tasks[-1].completed
            self._live.update(self._task, completed=amount, total=amount)
            self._live.stop_task(self._task)
            self._task = None


@contextmanager
def show_progress(quiet: bool = False) -> Iterator[ImageProgress]:
    """Yield the progress for this process's stderr: bars on a terminal, lines anywhere else."""
    if quiet:
        yield SILENT
    elif not sys.stderr.isatty():
        yield LineProgress()
    else:
        with show_bars(open_console(stderr=True)) as bars:
            yield bars


@contextmanager
def show_bars(console: Console, clock: Callable[[], float] | None = None) -> Iterator[BarProgress]:
    """Yield bars on a terminal; tests pass a clock."""
    from rich.filesize import decimal
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class AmountColumn(ProgressColumn):
        """Bytes done, with the rate: of the last seconds, at the end of the whole step."""

        def render(self, task: Task) -> Text:
            if not task.completed and not task.total:
                return Text()
            amount = decimal(int(task.completed))
            if task.total:
                amount += f" of {decimal(int(task.total))}"
            speed = task.completed / task.elapsed if task.finished and task.elapsed else task.speed
            return Text(f"{amount} {decimal(int(speed))}/s" if speed else amount)

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        AmountColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, get_time=clock) as live:
        bars = BarProgress(live)
        yield bars
        bars.done()
