"""The profilers of a training, switched on and off between its steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipway.trainer.config.profiling import ProfiledSteps
from slipway.trainer.config.settings import Settings
from slipway.trainer.distributed import RankContext
from slipway.trainer.logs import LOGGER
from slipway.trainer.report.phases import PhaseTimer

DIRECTORY = "profile_logs"


class Profiler:
    """The profilers of this rank; their records name the phases.

    Nsight Systems sees ``cudaProfilerStart`` and ``cudaProfilerStop``, and NVTX ranges of the operations
    between them. torch.profiler leaves a Chrome trace, CUDA's allocator a snapshot with the history of
    allocations; a CPU has neither of the other two.
    """

    def __init__(self, settings: Settings, rank_context: RankContext, phases: PhaseTimer) -> None:
        self._device, self._rank, self._phases = rank_context.device, rank_context.world.rank, phases
        self._directory = settings.output.log_dir / DIRECTORY
        self._memory_directory = settings.profiling.memory_directory or self._directory
        self._shapes = settings.profiling.shapes
        profiling, on_cuda = settings.profiling, self._device.type == "cuda"
        kinds: list[tuple[ProfiledSteps | None, Callable[[str], Callable[[], None]]]] = [
            (profiling.torch, self._trace)
        ]
        if on_cuda:
            kinds += [(profiling.nsys, self._capture), (profiling.memory, self._record_memory)]
        self._waiting = [(steps, begin) for steps, begin in kinds if steps and self._rank in steps.ranks]
        self._active: list[tuple[int, Callable[[], None]]] = []

    def begin_step(self, step: int) -> None:
        """Start the profilers that begin with a step, counted from 0.

        A training that resumes in the middle of its profiled steps profiles those that are left.
        """
        for steps, begin in [item for item in self._waiting if item[0].start <= step]:
            self._waiting.remove((steps, begin))
            if step <= steps.end:
                self._active.append((steps.end, begin(f"rank{self._rank}_step{step}")))
        self._phases.annotate = torch.profiler.record_function if self._active else None

    def is_last(self, step: int) -> bool:
        """Return whether a profiler that is on ends with a step, counted from 0."""
        return any(end <= step for end, _ in self._active)

    def end_step(self, step: int) -> None:
        """Stop the profilers that end with a step, counted from 0, and write their records."""
        for last, finish in [item for item in self._active if item[0] <= step]:
            self._active.remove((last, finish))
            finish()
        if not self._active:
            self._phases.annotate = None

    def close(self) -> None:
        """Stop the profilers that are still on, because the training ends before the last profiled step."""
        for last, _ in list(self._active):
            self.end_step(last)

    def _trace(self, name: str) -> Callable[[], None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()

        def finish() -> None:
            profile.stop()
            self._write(self._directory, f"trace_{name}", ".json", profile.export_chrome_trace)

        return finish

    def _capture(self, _name: str) -> Callable[[], None]:
        ranges = torch.autograd.profiler.emit_nvtx(record_shapes=self._shapes)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        ranges.__enter__()

        def finish() -> None:
            ranges.__exit__(None, None, None)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()

        return finish

    def _record_memory(self, name: str) -> Callable[[], None]:
        memory: Any = torch.cuda.memory
        memory._record_memory_history()

        def finish() -> None:
            self._write(self._memory_directory, f"memory_{name}", ".pickle", memory._dump_snapshot)
            memory._record_memory_history(enabled=None)

        return finish

    def _write(self, directory: Path, name: str, suffix: str, write: Callable[[str], Any]) -> None:
        """Write a file under a name that no earlier launch has taken; a full disk ends no training."""
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
        path = next(path for path in (directory / f"{name}{suffix}" for name in names) if not path.exists())
        unfinished = path.with_name(f".unfinished-{path.name}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write(str(unfinished))
            os.replace(unfinished, path)  # noqa: PTH105
        except OSError as error:
            LOGGER.warning("cannot write the profile %s: %s", path, error)
        else:
            LOGGER.info("profile %s", path)
