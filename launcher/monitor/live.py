"""The live view of a launch: one panel, redrawn until the job has ended."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from launcher.errors import escape
from launcher.jobs.launches import Launch
from launcher.monitor.progress import Progress
from launcher.monitor.run_status import silence_of, state_words
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from launcher.ui import tables
from launcher.ui.tables import colour
from launcher.ui.terminal import open_console
from slipway.common.node.events import Event, Train
from slipway.watch.messages import draw

_SPARK_WIDTH = 24


class LiveView(Live):
    """A view that redraws a panel with the state, the progress and the losses."""

    interval = 0.25

    def __init__(self, launch: Launch, console: Console | None = None) -> None:
        super().__init__(console=console or open_console(), refresh_per_second=8)
        self._launch = launch
        self._began = time.monotonic()
        self._losses: deque[float] = deque(maxlen=4096)
        self._spinner = Spinner("dots", style="yellow")

    def show(
        self, status: JobStatus, progress: Progress, new: Sequence[Event], *, is_over: bool = False
    ) -> None:
        self.update(self._panel(status, progress, new), refresh=is_over)

    def _panel(self, status: JobStatus, progress: Progress, new: Sequence[Event]) -> Panel:
        self._losses.extend(e.loss for e in new if isinstance(e, Train) and e.loss is not None)
        body: list[RenderableType] = [self._state(status, progress)]
        if progress.step is not None:
            train = Text.assemble(
                ("train loss    ", "dim"),
                (tables.loss(progress.loss), "bold blue"),
                (f"  {sparkline(list(self._losses))}", "blue"),
                ("  lr ", "dim"),
                tables.learning_rate(progress.train.learning_rate if progress.train else None),
            )
            body += [_bar(status, progress), train, _draw_held_out(progress)]
        manifest = self._launch.manifest
        title = Text.assemble((escape(manifest.run), "bold"), f" · launch {self._launch.paths.number}")
        shape = Text(tables.tasks(self._launch.nodes, manifest.tasks_per_node), style="dim")
        style = colour(status.state) if status.state.is_final else "dim"
        return Panel(
            Group(*body),
            ROUNDED,
            title=title,
            title_align="left",
            subtitle=shape,
            border_style=style,
            # A terminal prints ^C after the panel, where it must not begin another line.
            width=max(self.console.width - 3, 20),
        )

    def _state(self, status: JobStatus, progress: Progress) -> RenderableType:
        job = state_words(self._launch, status)[0]
        line = Text.assemble(f"{job}  ", (status.state.value, colour(status.state)))
        if status.reason:
            line.append(f" ({escape(status.reason)})", "dim")
        if status.nodes:
            line.append(f" on {status.nodes}")
        if status.elapsed and status.state is not State.PENDING:
            line.append(f"  {status.elapsed}", "dim")
        if status.state.is_final:
            return line
        if progress.step is None:
            elapsed = tables.duration(time.monotonic() - self._began)
            awaited = "the first step" if self._launch.manifest.stage == "training" else "its end"
            if status.state is State.PENDING:
                awaited = "the queue"
            self._spinner.update(text=line.append(f"  waiting for {awaited}, {elapsed}", "dim"))
            return self._spinner
        if silence := silence_of(status, progress):
            line.append(f"  {silence}", "bold yellow")
        return line


def _bar(status: JobStatus, progress: Progress) -> Table:
    total = progress.max_steps or 0
    step = progress.step or 0
    style = colour(status.state) if status.state.is_final else "cyan"
    share = f"{100 * step / total:.0f} %" if total else ""
    numbers = (Column(justify="right", no_wrap=True) for _ in range(3))
    grid = Table.grid(Column(), Column(ratio=1), *numbers, padding=(0, 2), expand=True)
    grid.add_row(
        Text(f"step {tables.steps(step, progress.max_steps)}"),
        ProgressBar(total=total or None, completed=step, complete_style=style, finished_style=style),
        Text(share),
        Text(f"{tables.count(progress.tokens_per_second)} tokens/s", style="bold"),
        Text("" if status.state.is_final else f"ETA {tables.duration(progress.eta)}"),
    )
    return grid


def _draw_held_out(progress: Progress) -> Text:
    loss = progress.validation_loss
    text = Text.assemble(("held-out loss ", "dim"), (tables.loss(loss), "bold dark_orange"))
    if progress.held_out:
        entropy = progress.held_out.unigram_entropy
        below = loss is not None and loss < entropy
        words = f"  {'below' if below else 'not yet below'} the unigram entropy {tables.loss(entropy)}"
        text.append(words, "green" if below else "dim")
    return text


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """Draw values as bars, each the mean of its share of them; values that are not finite are left out."""
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) < 2:
        return ""
    edges = [index * len(finite) // width for index in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    return draw(means)
