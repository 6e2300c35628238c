"""All that is estimated of a plan, for those who show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.estimates.cost import Amount, Cost, amount_of, estimate_cost
from launcher.estimates.gpus import Counted, gpu_of
from launcher.estimates.memory import StageMemory, estimate_memory
from launcher.plan import Plan


@dataclass(frozen=True, slots=True)
class Memory:
    """The stages of a pipeline, at least one, and the GPU that each is held against.

    `margin` is the part of the GPU's memory that the estimate has no say in.
    """

    stages: tuple[StageMemory, ...]
    counted: Counted
    margin: float

    @property
    def capacity(self) -> int:
        """What a GPU has, in bytes."""
        return self.counted.gpu.memory

    @property
    def usable(self) -> int:
        """What of it a stage may take without a word, in bytes."""
        return int(self.capacity * (1 - self.margin))

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    def to_json(self) -> dict[str, Any]:
        gpu, source, is_assumed = self.counted
        return {
            "gpu": {"name": gpu.name, "memory": gpu.memory, "source": source, "assumed": is_assumed},
            "margin": self.margin,
            "stages": [{**asdict(stage), "total": stage.total} for stage in self.stages],
        }


@dataclass(frozen=True, slots=True)
class Overview:
    """What a plan will take; ``None`` is what cannot be told: of some models `amount` can, and `cost` not."""

    memory: Memory | None
    amount: Amount | None
    cost: Cost | None


def overview(plan: Plan, gpu_types: Sequence[str] = ()) -> Overview:
    """Estimate a plan: of a range of nodes with the least of them, where a GPU holds the most."""
    job = plan.job
    stages = estimate_memory(job.config, job.resources.nodes, job.engine) if job.config is not None else None
    counted = gpu_of(job.resources, gpu_types)
    memory = Memory(stages, counted, plan.assumptions.memory_margin) if stages else None
    return Overview(memory, amount_of(plan), estimate_cost(plan, gpu_types))
