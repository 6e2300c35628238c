"""All estimates of a plan: memory, time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.estimates.cost import Cost, TrainingAmount, amount_of, estimate_cost
from launcher.estimates.gpus import CountedGpu, gpu_of
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.plan import Plan


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of each pipeline stage, at least one, and of the GPU that has to hold it.

    `margin` is the part of the GPU's memory for what is not estimated.
    """

    stages: tuple[StageMemory, ...]
    counted: CountedGpu
    margin: float

    @property
    def capacity(self) -> int:
        """The bytes of a GPU."""
        return self.counted.gpu.memory

    @property
    def usable(self) -> int:
        """The bytes that a stage may take without a warning."""
        return int(self.capacity * (1 - self.margin))

    @property
    def fullest(self) -> StageMemory:
        """The stage that takes the most."""
        return max(self.stages, key=lambda stage: stage.total)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate for programs."""
        gpu, source, is_assumed = self.counted
        return {
            "gpu": {"name": gpu.name, "memory": gpu.memory, "source": source, "assumed": is_assumed},
            "margin": self.margin,
            "stages": [{**asdict(stage), "total": stage.total} for stage in self.stages],
        }


@dataclass(frozen=True, slots=True)
class Overview:
    """The estimates of a plan, None where unknown: some models have an `amount`, but no `cost`."""

    memory: MemoryEstimate | None
    amount: TrainingAmount | None
    cost: Cost | None


def overview(plan: Plan, gpu_types: Sequence[str] = ()) -> Overview:
    """Estimate a plan, with the least nodes of a range: there a GPU holds the most."""
    job = plan.job
    stages = estimate_memory(job.config, job.resources.nodes, job.engine) if job.config is not None else None
    counted = gpu_of(job.resources, gpu_types)
    memory = MemoryEstimate(stages, counted, plan.assumptions.memory_margin) if stages else None
    return Overview(memory, amount_of(plan), estimate_cost(plan, gpu_types))
