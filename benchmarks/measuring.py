"""Measuring of training steps, by the benchmarks of `perf/` and by `gpu_check/`."""

from __future__ import annotations

import cProfile
import pstats
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Steps before it compile, choose kernels and fill caches.
STEADY_STEP = 15
_LONGEST = 10
_ATTENTION = re.compile("sdpa|flash|fmha|attention", re.IGNORECASE)
_COPIES = ("Memcpy", "Memset")

Step = Callable[[], Any]


class Cost(NamedTuple):
    """Seconds of one step, and those of CPU time, which other processes on the machine change less."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Speed:
    """The speed of a program: the median of its steps, with shares of the device's peak where that is known.

    `mfu` counts the scores of attention in full, `mfu_causal` the half that a GPT needs.
    """

    step_seconds: float
    fastest: float
    slowest: float
    tokens_per_second: float
    mfu: float | None
    mfu_causal: float | None


class Kernel(NamedTuple):
    """A kernel of a step: its name, its number of launches and their seconds."""

    name: str
    launches: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The kernels of one step; on a CPU its operators.

    `busy_seconds` is the time in which at least one of them ran; `attention` names those of attention.
    """

    kernels: int
    busy_seconds: float
    longest: list[Kernel]
    attention: list[str]


def speed(seconds: Sequence[float], tokens: int, at_peak: tuple[float, float] | None) -> Speed:
    """Summarize the seconds of steps.

    Parameters
    ----------
    tokens
        Tokens of a step.
    at_peak
        Seconds of a step at the device's peak, with attention counted in full and causal; None if unknown.
    """
    middle = statistics.median(seconds)
    full, causal = (peak / middle for peak in at_peak) if at_peak else (None, None)
    return Speed(middle, min(seconds), max(seconds), tokens / middle, full, causal)


def take_turns(
    steps: Mapping[str, Step], turns: int, counts: Mapping[str, int], synchronize: Callable[[], None]
) -> dict[str, list[Cost]]:
    """Return the costs of a step of each program, one for each turn of so many steps."""
    costs: dict[str, list[Cost]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            synchronize()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(counts[name]):
                step()
            synchronize()
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            costs[name].append(Cost(wall / counts[name], cpu / counts[name]))
    return costs


def synchronizer(device: Any) -> Callable[[], None]:
    """Return the function that waits for a device."""
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def profile_step(step: Step, device: Any) -> Profile:
    """Run a step under `torch.profiler`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        step()
        synchronizer(device)()
    events = [event for event in profiler.events() if event.device_type == kind]
    return summarize_kernels(
        # Microseconds.
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in events
        if not event.is_user_annotation
    )


def profile_host(step: Step, steps: int = 5) -> list[tuple[str, float, float]]:
    """Return the functions with most of the host's time: the name of each, its calls and seconds a step."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    rows = [
        (f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})", calls / steps, seconds / steps)
        for (file, line, name), (_, calls, seconds, *_) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row[2])[:_LONGEST]


def summarize_kernels(events: Iterable[tuple[str, float, float]]) -> Profile:
    """Summarize the kernels of one step, each with its name, start and end in seconds."""
    launches: dict[str, list[float]] = defaultdict(list)
    busy, until = 0.0, 0.0
    for name, start, end in sorted(events, key=lambda event: event[1]):
        launches[name].append(end - start)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    kernels = [Kernel(name, len(runs), sum(runs)) for name, runs in launches.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return Profile(
        kernels=sum(kernel.launches for kernel in kernels if not kernel.name.startswith(_COPIES)),
        busy_seconds=busy,
        longest=kernels[:_LONGEST],
        attention=[kernel.name for kernel in kernels if _ATTENTION.search(kernel.name)],
    )
