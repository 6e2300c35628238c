"""Models with compiled layers beside the same ones without; run by test_compiled.py from a warm process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from slipway.common.errors import UserError
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.model import compiled
from slipway.trainer.model.compiled import compile_layers, explain_uncompiled, guard_dropout
from slipway.trainer.world import World
from tests.trainer.probe_t5 import PADDED, batches


def main(arguments: list[str]) -> int:
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    cases: dict[str, dict[str, Any]] = json.loads(arguments[1])
    settings = {name: read_settings({**base, **keys}) for name, keys in cases.items()}
    world = World.from_environment(os.environ)
    with process_group(world, "auto") as device:
        layout = make_layout(next(iter(settings.values())), world.size)
        rank_context = make_rank_context(world, layout, device)
        result = {
            name: {
                "plain": step(settings[name], rank_context, None),
                "compiled": step(settings[name], rank_context, name.rpartition(" ")[2]),
                "graphs": count_graphs(),
            }
            for name in cases
        }
    first = next(iter(settings.values()))
    print(
        json.dumps({"cases": result, "aligned": is_dropout_aligned(first), "explained": explain(base, first)})
    )
    return 0


def step(settings: Settings, rank_context: Any, backend: str | None) -> list[Any]:
    """Return the losses and gradient norms of two steps, and the loss of a validation after them.

    torch's own compiler takes long: it compiles no validation.
    """
    from slipway.trainer.loop.step import StepReduction, evaluate_losses, train_losses
    from slipway.trainer.model.build import build_model
    from slipway.trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, PADDED)
    if backend:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compile_layers(model.chunks, backend)
    optimizer, numbers = Optimizer(settings, model, rank_context.device), []
    for _ in range(2):
        loss = train_losses(settings, model, iter(micro_batches(settings)), 4)
        numbers += [StepReduction(loss).read()[0], optimizer.step(1e-2)]
        optimizer.zero_grad()
    if backend == "inductor":
        return numbers
    sums = evaluate_losses(settings, model, iter(micro_batches(settings)), 4)
    return [*numbers, float(sums[0])]


def micro_batches(settings: Settings) -> list[Any]:
    """Return the four micro batches of the first eight samples."""
    from slipway.trainer.data.batches import GPTBatchBuilder
    from slipway.trainer.data.source import MockSource

    if settings.encoder:
        return batches(settings)
    builder = GPTBatchBuilder(300, None, settings.micro_batch, torch.device("cpu"))
    return list(builder.batches(MockSource(settings.seq_length, 300, 1, False), list(range(8))))


def count_graphs() -> list[int]:
    """Return the number of compiled graphs, and of places at which one was broken off."""
    counters = torch._dynamo.utils.counters
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


def explain(base: dict[str, Any], settings: Settings) -> dict[str, str | None]:
    """Return why layers are not compiled, for several devices and keys."""

    def ask(kind: str, gathers: bool = False, compiler: str = "", **keys: Any) -> str | None:
        # Any compiler is there, or one alone.
        compiled.shutil.which = lambda name: name == compiler or not compiler
        chosen = read_settings({**base, **{f"model.{name}": value for name, value in keys.items()}})
        config = SimpleNamespace(context_parallel_size=1, bf16=True)
        chunks = [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=gathers))]
        try:
            return explain_uncompiled(chosen, config, chunks, torch.device(kind))
        except UserError as error:
            return f"refused: {error}"

    if settings.encoder:
        return {}
    return {
        "cuda": ask("cuda"),
        "cpu": ask("cpu"),
        "off": ask("cuda", compile_layers=False),
        "tensor": ask("cuda", tensor_model_parallel_size=2),
        "engine": ask("cuda", transformer_engine=True),
        "gathers": ask("cuda", gathers=True),
        "gathers and must": ask("cuda", gathers=True, compile_layers=True),
        "no compiler": ask("cuda", compiler="icx"),
        "no compiler and must": ask("cpu", compiler="icx", compile_layers=True),
        "clang": ask("cuda", compiler="clang"),
        "local and must": ask("cpu", attention_dropout=0.1, compile_layers=True),
    }


def is_dropout_aligned(settings: Settings) -> list[bool]:
    """Return whether compiled dropout draws eager numbers: on a CPU, on CUDA without dropout, and with it."""
    import torch._inductor.config as inductor

    aligned = []
    for kind, dropout in (("cpu", 0.1), ("cuda", 0.0), ("cuda", 0.1)):
        shape = replace(settings.architecture, hidden_dropout=dropout)
        guard_dropout(replace(settings, architecture=shape), torch.device(kind))
        aligned.append(inductor.align_random_eager)
    return aligned
