"""Run by test_t5_models.py from a warm process: builds T5 models without a training around them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from trainer.config.layout import make_layout
from trainer.config.load import flatten
from trainer.config.settings import Settings, read_settings
from trainer.distributed import make_rank_context, process_group
from trainer.world import World

# What the tokenizer has, its sentinels, and both padded to a multiple of 8.
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
    from trainer.loop.step import StepReduction, train_losses
    from trainer.model.build import build_model
    from trainer.model.model import parameter_count
    from trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, PADDED)
    optimizer = Optimizer(settings, model, rank_context.device)
    weights = dict(model.named_parameters())
    found = {
        "parameters": parameter_count(model),
        "names": list(weights),
        "alike": alike(weights),
        "changed": what_changes(model, batches(settings)[0]),
        "loss": StepReduction(train_losses(settings, model, iter(batches(settings)), 4)).read()[0],
    }
    found["without_gradient"] = [name for name, weight in weights.items() if not weight.main_grad.any()]
    found["grad_norm"] = optimizer.step(1e-2)
    found["after"] = StepReduction(train_losses(settings, model, iter(batches(settings)), 4)).read()[0]
    return found


def batches(settings: Settings) -> list[Any]:
    """Return the four micro batches of the first eight samples."""
    from trainer.data.denoising import T5BatchBuilder
    from trainer.data.source import MockSource
    from trainer.data.spans import sample_lengths
    from trainer.data.vocabulary import Vocabulary

    assert settings.denoising is not None
    width = settings.architecture.seq_length
    lengths = sample_lengths(settings.denoising, settings.seq_length, width)
    vocabulary = Vocabulary(TEXT, 0, "made up").with_sentinels(SENTINELS)
    batch_builder = T5BatchBuilder(lengths, vocabulary, width, (1, 0), 2, torch.device("cpu"))
    return list(batch_builder.batches(MockSource(lengths.raw, TEXT, 1), list(range(8)), range(8)))


def alike(weights: dict[str, Any]) -> list[str]:
    """Return the layers' matrices that start as another of the same shape does."""
    layers = [(name, weight) for name, weight in weights.items() if ".layers." in name and weight.dim() == 2]
    return [
        f"{name} {other}"
        for number, (name, weight) in enumerate(layers)
        for other, second in layers[number + 1 :]
        if weight.shape == second.shape and torch.equal(weight, second)
    ]


def what_changes(model: Any, batch: Any) -> dict[str, list[int]]:
    """Return at which targets the loss changes with the encoder's last token, and the decoder's middle."""
    model.eval()
    chunk = model.chunks[0]
    middle = batch.labels.shape[1] // 2
    with torch.no_grad():
        plain = chunk(**batch.arguments())
        read = chunk(**replace(batch, inputs=other(batch.inputs, -1)).arguments())
        written = chunk(**replace(batch, decoder_inputs=other(batch.decoder_inputs, middle)).arguments())
    return {"encoder": places(plain, read), "decoder": places(plain, written)}


def other(tokens: Any, rank_context: int) -> Any:
    changed = tokens.clone()
    changed[:, rank_context] = (changed[:, rank_context] + 1) % TEXT
    return changed


def places(first: Any, second: Any) -> list[int]:
    return [
        int(rank_context)
        for rank_context in ((first - second).abs().max(0).values > 1e-7).nonzero().flatten()
    ]
