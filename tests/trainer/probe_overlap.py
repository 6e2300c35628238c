"""Steps with communication beside them; run by test_overlap.py in processes forked from a warm one.

``probe_overlap CONFIG CASES``: for each case of the JSON, a name with what changes in the configuration, take
steps and tell their losses, and the digests of the weights on this rank and in a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core import parallel_state

from slipway.trainer.checkpoint import state
from slipway.trainer.checkpoint.state import Progress
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World
from tests.trainer.fused_adam import stand_in_for_fused_adam
from tests.trainer.probe_resharding import VOCABULARY, Training, _digests

STEPS = 3


def main(arguments: list[str]) -> int:
    config = Path(arguments[0])
    base, world = flatten(yaml.safe_load(config.read_text())), World.from_environment(os.environ)
    stand_in_for_fused_adam()
    # States are saved by parameter, whatever the buckets, so that they can be compared.
    state.has_empty_share = lambda _: True
    results: dict[str, Any] = {}
    with process_group(world, "auto") as device:
        for name, changes in json.loads(arguments[1]).items():
            settings = read_settings({**base, **changes})
            rank_context = make_rank_context(world, make_layout(settings, world.size), device)
            training = Training(settings, rank_context, Progress())
            losses = [training.step() for _ in range(STEPS)]
            stale = weights(training)
            training.save(config.parent, name).finish()
            results[name] = {
                "losses": losses,
                "buckets": [len(chunk.bucket_groups) for chunk in training.model.chunks],
                "gathered by the save": stale != weights(training),
                "after": training.step(),
            }
            parallel_state.destroy_model_parallel()
        results["extra states"] = extra_states(base, config, world, device)
    if world.is_main:
        for name in set(results) - {"extra states"}:
            results[name]["tensors"] = _digests(config.parent / name)
        print(json.dumps(results))
    return 0


def extra_states(base: dict[str, Any], config: Path, world: World, device: Any) -> list[list[int]]:
    """Return the layers' extra states at a save, and those that they get at its restoration.

    Transformer Engine's layers keep the largest values of earlier steps so, by the same two methods.
    """
    from megatron.core.tensor_parallel import layers

    states: list[list[int]] = [[], []]
    originals: dict[Any, Any] = {}

    def take(_: Any, extra: Any) -> None:
        states[1].extend([] if extra is None else extra.tolist())

    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        originals[kind] = kind.get_extra_state, kind.set_extra_state
        # The head stays in bf16, and has none.
        kind.get_extra_state = lambda layer: (
            torch.tensor([layer.input_size, layer.output_size]) if layer.output_size != VOCABULARY else None
        )
        kind.set_extra_state = take
    settings = read_settings(base)
    rank_context = make_rank_context(world, make_layout(settings, world.size), device)
    training = Training(settings, rank_context, Progress())
    for module in training.model.chunks[0].modules():
        if isinstance(module, tuple(originals)):
            states[0].extend([] if (extra := module.get_extra_state()) is None else extra.tolist())
    training.step()
    training.save(config.parent, "extra").finish()
    training.restore(config.parent / "extra")
    for kind, methods in originals.items():
        kind.get_extra_state, kind.set_extra_state = methods
    parallel_state.destroy_model_parallel()
    return states


def weights(training: Training) -> str:
    """Return a digest of the weights as this rank has them."""
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
