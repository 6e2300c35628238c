"""Parameter counts of models whose weights take no memory; run by test_stock_sizes.py from a warm process."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World


def _draw_no_numbers() -> None:
    """Replace the drawing of numbers, which takes most of building a large model and is not needed here."""
    torch.manual_seed = lambda seed: torch.default_generator
    torch.nn.init.normal_ = lambda tensor, *_, **__: tensor


def main(arguments: list[str]) -> int:
    _draw_no_numbers()
    requests: dict[str, dict[str, Any]] = json.loads(Path(arguments[1]).read_text())
    counts = {}
    with process_group(World.from_environment({"MASTER_PORT": arguments[0]}), "auto") as device:
        rank_context = None
        for size, request in requests.items():
            settings = on_one_rank(read_settings(request["flat"]))
            rank_context = rank_context or make_rank_context(
                settings_world(), make_layout(settings, 1), device
            )
            counts[size] = parameters(
                settings, replace(rank_context, device=torch.device("meta")), request["vocabulary"]
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"parameters": counts, "megabytes": peak}))
    return 0


def settings_world() -> World:
    return World.from_environment({})


def on_one_rank(settings: Settings) -> Settings:
    """Count the whole model on this rank: the stock layouts divide it among up to thousands."""
    alone = replace(settings.parallel, tensor=1, pipeline=1, virtual=1, context=1, sequence=False)
    return replace(settings, parallel=alone, nodes=1, devices=1)


def parameters(settings: Settings, rank_context: Any, vocabulary: int) -> int:
    """Build the model's one chunk without its weights, and count."""
    from slipway.trainer.model.gpt import gpt_chunks
    from slipway.trainer.model.seeding import seed_weights
    from slipway.trainer.model.t5 import t5_chunks

    seed_weights(settings.seed)
    # megatron-core makes weights where it computes.
    before, torch.cuda.current_device = torch.cuda.current_device, lambda: rank_context.device
    try:
        with rank_context.device:
            build = t5_chunks if settings.encoder else gpt_chunks
            _, (model,) = build(settings, rank_context, vocabulary)
    finally:
        torch.cuda.current_device = before
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())
