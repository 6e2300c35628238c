"""The model whose throughput is measured: its composed configuration, and its estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.estimates.cost import overview

_MICRO_BATCHES = 4
_DEFAULTS = (
    "training=gpt3/126m",
    "cluster=local",
    "engine=megatron",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    "container=null",
)


@dataclass(frozen=True)
class Model:
    """A training's configuration, and the estimates of it that are known."""

    config: dict[str, Any]
    estimate: dict[str, Any]


def compose(overrides: Sequence[str]) -> Model:
    """Compose the model of overrides, with a batch of a few micro batches.

    Raises
    ------
    launcher.errors.UserError
        If the overrides are wrong, or ask for no training by our own trainer.
    """
    names = {text.partition("=")[0] for text in overrides}

    def drafted(extra: Sequence[str]) -> Draft:
        # The user's own overrides win.
        ours = [text for text in (*_DEFAULTS, *extra) if text.partition("=")[0] not in names]
        return draft(Request([*ours, *overrides], ["python", "-m", "benchmarks.gpu_check", *overrides]))

    launch = drafted(())
    job = launch.plan.job
    if job.config is None or job.engine != "megatron":
        raise UserError("gpu_check runs our own trainer: stages=[training] and engine=megatron are needed")
    # The measured batch and the estimated one are the same.
    launch = drafted(batch_overrides(job.config))
    return Model(dict(launch.plan.job.config or {}), _estimate(launch))


def batch_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which a step takes a few micro batches, as a whole one may take minutes.

    With pipeline stages it takes a multiple of theirs, which virtual stages need.
    """
    model, keys = config["model"], ("tensor_model", "pipeline_model", "context")
    tensor, pipeline, context = (model.get(f"{key}_parallel_size") or 1 for key in keys)
    data = max(1, config["trainer"]["devices"] // (tensor * pipeline * context))
    most = model["micro_batch_size"] * data * pipeline * math.ceil(_MICRO_BATCHES / pipeline)
    overrides = []
    if model["global_batch_size"] > most:
        overrides.append(f"training.model.global_batch_size={most}")
    if model.get("rampup_batch_size"):
        overrides.append("training.model.rampup_batch_size=null")
    return overrides


def _estimate(launch: Draft) -> dict[str, Any]:
    estimates = overview(launch.plan)
    values: dict[str, Any] = {}
    if estimates.memory is not None:
        values["gpu"] = estimates.memory.counted.gpu.name
        values["peak_bytes"] = estimates.memory.fullest.total
    if estimates.cost is not None:
        values["step_seconds"], values["mfu"] = estimates.cost.seconds_per_step, estimates.cost.mfu
    return values
