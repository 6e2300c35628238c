"""The profilers of a training: NeMo's `nsys_profile` and `memory_profile`, and our `torch_profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from slipway.trainer.config.rows import OFF, Row, optional, path, read_rows
from slipway.trainer.config.values import Values

NO_NSYS = "Nsight Systems traces GPUs"
NO_MEMORY = "memory snapshots are of CUDA's allocator"


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps that some ranks profile, counted from 0 as in NeMo; the last is included."""

    start: int
    end: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Profiling:
    """The profilers that are on.

    Attributes
    ----------
    nsys, torch, memory
        Nsight Systems, torch.profiler, and snapshots of CUDA's memory; None if off.
    shapes
        Whether the NVTX ranges of operations have the shapes of their operands.
    memory_directory
        The directory of the snapshots; None for that of the other profiles.
    """

    nsys: ProfiledSteps | None
    torch: ProfiledSteps | None
    memory: ProfiledSteps | None
    shapes: Annotated[bool, Row("model.nsys_profile.gen_shape", OFF, on_cpu=NO_NSYS)]
    memory_directory: Annotated[
        Path | None, Row("model.memory_profile.output_path", optional(path), on_cpu=NO_MEMORY)
    ]


def read_profiling(values: Values, max_steps: int, ranks: int | None) -> Profiling:
    """Read the three nodes; each is off by default.

    Parameters
    ----------
    ranks
        Ranks of the training, None if only the job knows.

    Raises
    ------
    UserError
        If a value is invalid, a profile would never begin, or two profilers would exclude each other.
    """
    nsys = _read_profiled_steps(values, "model.nsys_profile", "ranks", max_steps, ranks)
    torch = _read_profiled_steps(values, "model.torch_profile", "ranks", max_steps, ranks)
    if nsys and torch:
        values.fail(
            "model.torch_profile.enabled",
            "False with model.nsys_profile.enabled=True: torch has one profiler at a time",
        )
    return read_rows(
        Profiling,
        values,
        nsys=nsys,
        torch=torch,
        memory=_read_profiled_steps(values, "model.memory_profile", "rank", max_steps, ranks),
    )


def _read_profiled_steps(
    values: Values, node: str, ranks_name: str, max_steps: int, world: int | None
) -> ProfiledSteps | None:
    start = values.integer(f"{node}.start_step", 0, minimum=0)
    end = values.integer(f"{node}.end_step", start, minimum=0)
    ranks = _ranks(values, f"{node}.{ranks_name}")
    if not values.flag(f"{node}.enabled", False):
        return None
    if start >= max_steps:
        values.fail(f"{node}.start_step", f"a step below trainer.max_steps={max_steps}, counted from 0")
    if end < start:
        values.fail(f"{node}.end_step", f"a step from start_step={start} on")
    if world is not None and max(ranks) >= world:
        values.fail(f"{node}.{ranks_name}", f"ranks 0 to {world - 1}")
    return ProfiledSteps(start, end, ranks)


def _ranks(values: Values, key: str) -> tuple[int, ...]:
    if not key.endswith("s"):
        return (values.integer(key, 0, minimum=0),)
    ranks = values.raw(key)
    if ranks is None:
        return (0,)
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        values.fail(key, "a list of ranks, such as [0]")
    return tuple(ranks)
