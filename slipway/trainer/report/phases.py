"""Timers of the phases of a step, and the comparison of the ranks by them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

DATA, FORWARD_BACKWARD, REDUCTION = "data", "forward_backward", "reduction"
OPTIMIZER, VALIDATION, SAVE = "optimizer", "validation", "save"
PHASES = (DATA, FORWARD_BACKWARD, REDUCTION, OPTIMIZER, VALIDATION, SAVE)


class PhaseTimer:
    """Exclusive times of the phases on one rank: a phase inside another interrupts it.

    Phases begin and end at marks: CUDA events on the current stream of a GPU, the clock on a CPU. Marks of a
    step are read one step later, when the device has passed them in any case: nothing waits for them. A step
    reaches from the end of the one before to its own end, with the validation and the save between them.

    Parameters
    ----------
    completed
        Steps before this launch.

    Attributes
    ----------
    annotate
        While a profiler records: returns the range in which a phase is shown.
    """

    def __init__(self, device: Any, completed: int = 0) -> None:
        self.annotate: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None
        self._on_cuda = device.type == "cuda"
        self._spare: list[Any] = []
        self._stack: list[str | None] = [None]
        self._marks: list[tuple[str | None, Any]] = [(None, self._mark())]
        self._step_before: list[tuple[str | None, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._first, self._read, self._ended = completed + 1, completed, completed

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside to a phase."""
        self._stack.append(name)
        self._marks.append((name, self._mark()))
        try:
            with self.annotate(name) if self.annotate else contextlib.nullcontext():
                yield
        finally:
            self._stack.pop()
            self._marks.append((self._stack[-1], self._mark()))

    def measure(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function whose calls count to a phase."""

        def call(*arguments: Any, **options: Any) -> T:
            with self.phase(name):
                return function(*arguments, **options)

        return call

    def items(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield items; the time until each is there counts to a phase."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def end_step(self) -> None:
        """End a step after its loss was read, behind which are all marks of the step before."""
        self._read_step_before()
        boundary = (None, self._mark())
        self._step_before, self._marks = [*self._marks, boundary], [boundary]
        self._ended += 1

    def end(self) -> None:
        """Read the marks of the last steps, and of what came after them."""
        if self._on_cuda:
            torch.cuda.synchronize()
        self._read_step_before()
        self._step_before = [*self._marks, (None, self._mark())]
        if self._on_cuda:
            torch.cuda.synchronize()
        self._read_step_before()

    def take(self) -> tuple[range, list[float]]:
        """Return the steps that were read since the last call, and the mean seconds of each of `PHASES`.

        The steps are the same on all ranks; there may be none.
        """
        steps = range(self._first, self._read + 1)
        seconds = [self._seconds[name] / max(len(steps), 1) for name in PHASES]
        if steps:
            self._first = self._read + 1
            self._seconds = dict.fromkeys(PHASES, 0.0)
        return steps, seconds

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_step_before(self) -> None:
        for (name, begin), (_, end) in itertools.pairwise(self._step_before):
            if name is not None:
                self._seconds[name] += begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
        if self._on_cuda:
            self._spare += [event for _, event in self._step_before[:-1]]
        self._step_before = []
        self._read = self._ended


def compare(by_rank: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the slowest rank of each phase that took place.

    Parameters
    ----------
    by_rank
        Seconds, ``[ranks][PHASES]``.

    Returns
    -------
    dict
        By phase: ``max``, in seconds, of the rank ``slowest_rank``, and ``spread``, the seconds between it
        and the fastest rank.
    """
    phases = {}
    for index, name in enumerate(PHASES):
        seconds = [times[index] for times in by_rank]
        longest = max(seconds)
        if longest > 0:
            rank = seconds.index(longest)
            phases[name] = {"max": longest, "spread": longest - min(seconds), "slowest_rank": rank}
    return phases
