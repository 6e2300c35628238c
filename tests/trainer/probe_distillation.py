"""Gradients of a student, and the peak of its memory; run by test_distillation.py from a warm process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from slipway.trainer import cpu_shim
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.data.vocabulary import Vocabulary
from slipway.trainer.world import World
from tests.trainer.distillation_reference import CASES


def main(arguments: list[str]) -> int:
    cpu_shim.install()
    from slipway.trainer.distributed import make_rank_context, process_group

    settings, root = (
        read_settings(flatten(yaml.safe_load(Path(arguments[0]).read_text()))),
        Path(arguments[2]),
    )
    reference = torch.load(root / "reference.pt", weights_only=True)
    world = World.from_environment({"MASTER_PORT": arguments[1]})
    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(settings, 1), device)
        result = {name: compare(settings, rank_context, name, reference, root / "student") for name in CASES}
        result["compiled"] = compare(compile_all(settings), rank_context, "all", reference, root / "student")
    print(json.dumps(result))
    return 0


def compile_all(settings: Settings) -> Settings:
    """Have layers compiled as on a GPU, by a compiler that runs each operation."""
    from slipway.trainer.model import build

    build.explain_uncompiled = lambda *_: None
    build.compile_layers = partial(build.compile_layers, backend="aot_eager")
    return replace(settings, architecture=replace(settings.architecture, attention_backend="sdpa"))


def compare(
    settings: Settings, rank_context: Any, case: str, reference: dict[str, Any], student: Path
) -> dict[str, float]:
    """Return the relative differences of the loss and of the gradients, by their parameter's largest."""
    from slipway.trainer.conversion.teacher import open_teacher
    from slipway.trainer.model.build import build_model
    from tests.trainer.parity.parity_probe import worst_gradient
    from tests.trainer.parity.parity_weights import rows_by_parameter

    assert settings.distillation is not None
    entropy, divergence, cosine, temperature = CASES[case]
    terms = replace(
        settings.distillation,
        cross_entropy=entropy,
        divergence=divergence,
        cosine=cosine,
        temperature=temperature,
    )
    settings = replace(settings, distillation=terms)
    size = int(settings.configuration["model.override_vocab_size"])
    words = Vocabulary(size, 0, "the reference's")
    model = build_model(settings, rank_context, size, teacher=open_teacher(settings, rank_context, words))
    known = open_teacher(replace(settings, distillation=replace(terms, teacher=student)), rank_context, words)
    assert known is not None
    known.fill(model.sharded_state_dict(), range(2))
    model.train()
    model.zero_grad_buffer()
    tokens = reference["tokens"]
    positions = torch.arange(tokens.shape[1] - 1).expand_as(tokens[:, 1:])
    (chunk,) = model.chunks
    loss = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
    loss.backward()
    model.config.finalize_model_grads_func(model.chunks)
    expected = reference[case]
    rows = rows_by_parameter(settings, size)
    return {
        "loss": abs(loss.item() / expected["loss"] - 1),
        "gradient": worst_gradient(chunk.module, rank_context, rows, expected["gradients"]),
    }
