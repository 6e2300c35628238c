"""The logits of our models with the weights of checkpoints; run by test_huggingface.py in a warm process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from slipway.trainer.checkpoint import state
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import read_settings
from slipway.trainer.world import World
from tests.trainer.parity.parity_probe import gather_logits, our_arguments


def main(arguments: list[str]) -> int:
    from slipway.trainer import cpu_shim

    cpu_shim.install()
    from slipway.trainer.distributed import make_rank_context, process_group
    from slipway.trainer.model.build import build_model

    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    cases: dict[str, dict[str, Any]] = json.loads(arguments[1])
    root, size = Path(arguments[2]), int(arguments[3])
    inputs, logits = torch.load(root / "inputs.pt"), {}
    world = World.from_environment(os.environ)
    all_settings = {name: read_settings({**base, **keys}) for name, keys in cases.items()}
    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(next(iter(all_settings.values())), 1), device)
        for name, settings in all_settings.items():
            model = build_model(settings, rank_context, size, is_trained=False)
            state.load_weights(root / name / "checkpoint", model)
            with torch.no_grad():
                logits[name] = gather_logits(
                    model.chunks[0](**our_arguments(name, inputs[name])), rank_context
                )
    torch.save(logits, root / "ours.pt")
    print(json.dumps(sorted(logits)))
    return 0
