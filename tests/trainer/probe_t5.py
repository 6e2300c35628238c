"""T5 models without a training around them; run by test_t5_models.py from a warm process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World

# The tokenizer's tokens, its sentinels, and both padded to a multiple of 8.
TEXT, SENTINELS, PADDED = 200, 100, 304


def main(arguments: list[str]) -> int:
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    settings = read_settings(base)
    world = World.from_environment({"MASTER_PORT": arguments[1]})
    result: dict[str, Any] = {}
    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(settings, 1), device)
        for name, changes in json.loads(arguments[2]).items():
            result[name] = one_variant(read_settings({**base, **changes}), rank_context)
    print(json.dumps(result))
    return 0


def one_variant(settings: Settings, rank_context: Any) -> dict[str, Any]:
    """Build a model, look at what it sees, and take one step; return numbers that tell it apart."""
    from slipway.trainer.loop.step import StepReduction, train_losses
    from slipway.trainer.model.build import build_model
    from slipway.trainer.model.model import parameter_count
    from slipway.trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, PADDED)
    optimizer = Optimizer(settings, model, rank_context.device)
    weights = dict(model.named_parameters())
    numbers = {
        "parameters": parameter_count(model),
        "names": list(weights),
        "alike": alike(weights),
        "changed": changed_places(model, batches(settings)[0]),
        "loss": StepReduction(train_losses(settings, model, iter(batches(settings)), 4)).read()[0],
    }
    numbers["without_gradient"] = [name for name, weight in weights.items() if not weight.main_grad.any()]
    numbers["grad_norm"] = optimizer.step(1e-2)
    numbers["after"] = StepReduction(train_losses(settings, model, iter(batches(settings)), 4)).read()[0]
    return numbers


def batches(settings: Settings) -> list[Any]:
    """Return the four micro batches of the first eight samples."""
    from slipway.trainer.data.denoising import T5BatchBuilder
    from slipway.trainer.data.source import MockSource
    from slipway.trainer.data.spans import sample_lengths
    from slipway.trainer.data.vocabulary import Vocabulary

    assert settings.denoising is not None
    width = settings.architecture.seq_length
    lengths = sample_lengths(settings.denoising, settings.seq_length, width)
    vocabulary = Vocabulary(TEXT, 0, "made up").add_sentinels(SENTINELS)
    batch_builder = T5BatchBuilder(lengths, vocabulary, width, (1, 0), 2, torch.device("cpu"))
    return list(batch_builder.batches(MockSource(lengths.raw, TEXT, 1), list(range(8)), range(8)))


def alike(weights: dict[str, Any]) -> list[str]:
    """Return the layers' matrices that start as another of the same shape does."""
    layers = [(name, weight) for name, weight in weights.items() if ".layers." in name and weight.dim() == 2]
    return [
        f"{name} {other_name}"
        for number, (name, weight) in enumerate(layers)
        for other_name, other_weight in layers[number + 1 :]
        if weight.shape == other_weight.shape and torch.equal(weight, other_weight)
    ]


def changed_places(model: Any, batch: Any) -> dict[str, list[int]]:
    """Return at which targets the loss changes with the encoder's last token, and the decoder's middle."""
    model.eval()
    chunk = model.chunks[0]
    middle = batch.labels.shape[1] // 2
    with torch.no_grad():
        plain = chunk(**batch.arguments())
        encoder_changed = chunk(**replace(batch, inputs=change_token(batch.inputs, -1)).arguments())
        decoder_changed = chunk(
            **replace(batch, decoder_inputs=change_token(batch.decoder_inputs, middle)).arguments()
        )
    return {"encoder": places(plain, encoder_changed), "decoder": places(plain, decoder_changed)}


def change_token(tokens: Any, place: int) -> Any:
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % TEXT
    return changed


def places(first: Any, second: Any) -> list[int]:
    return [int(place) for place in ((first - second).abs().max(0).values > 1e-7).nonzero().flatten()]
