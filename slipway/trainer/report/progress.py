"""The line per step that people read, and its times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator


class StepClock:
    """Times steps from the end of one to the end of the next, without validations and saves.

    A GPU runs the optimizer after the launch of its step: a time from a step's beginning to that launch would
    leave it out, and the waiting for other ranks too.

    Parameters
    ----------
    synchronize
        Waits for the device; None where nothing is asynchronous.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last step."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    @contextlib.contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the time of the block, but not the device's remaining work for the step before."""
        if self._synchronize:
            self._synchronize()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


def time_left(steps: int, recent: Collection[float]) -> float:
    """Return the seconds that so many steps will take at the pace of recent ones, never negative."""
    return max(0, steps) * sum(recent) / len(recent)


def step_line(
    step: int,
    total: int,
    loss: float,
    lr: float,
    grad_norm: float,
    tokens_per_second: float,
    seconds: float,
    eta: float,
    mfu: tuple[float, float] | None = None,
) -> str:
    """Format one training step; `mfu` counts attention in full, and causal attention's half."""
    share = "" if mfu is None else f"MFU {100 * mfu[0]:.1f} %, causal {100 * mfu[1]:.1f} % | "
    return (
        f"step {step:>{len(str(total))}}/{total} | loss {loss:.4f} | lr {lr:.1e} | "
        f"grad norm {grad_norm:.2f} | {tokens_per_second:,.0f} tokens/s | {seconds:.2f} s/step | {share}"
        f"eta {duration(eta)}"
    )


def duration(seconds: float) -> str:
    """Format seconds as ``m:ss``, ``h:mm:ss`` or ``d-hh:mm:ss``."""
    minutes, second = divmod(int(max(0.0, seconds) + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def count(many: int) -> str:
    """Format a large number with its unit: 124.4M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if many >= size:
            return f"{many / size:.1f}{unit}"
    return str(many)


def number(of: int, noun: str) -> str:
    """Format a number of things: 1 batch, 2 batches."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{of:,} {noun}{plural * (of != 1)}"
