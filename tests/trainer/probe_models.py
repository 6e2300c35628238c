"""Models without a training around them; run by test_models.py from a warm process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from slipway.trainer import cpu_shim
from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.load import flatten
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.distributed import make_rank_context, process_group
from slipway.trainer.world import World


def main(arguments: list[str]) -> int:
    result: dict[str, Any] = {"cpu": cpu_shim.install()}
    base = flatten(yaml.safe_load(Path(arguments[0]).read_text()))
    settings = read_settings(base)
    world = World.from_environment({"MASTER_PORT": arguments[1]})
    with process_group(world, "auto") as device:
        rank_context = make_rank_context(world, make_layout(settings, 1), device)
        result["variants"] = {
            name: one_step(read_settings({**base, **changes}), rank_context)
            for name, changes in json.loads(arguments[2]).items()
        }
        result["decay"] = weight_decay(settings, rank_context)
        result["norm"] = norm_difference()
        result["small_scale"] = small_scale_counts()
        result["foreign"] = foreign_token(device)
        result["waits"] = waits_in_a_step(settings, rank_context)
        result["overflow"] = overflowing_gradient(settings, rank_context)
    print(json.dumps(result))
    return 0


def one_step(settings: Settings, rank_context: Any) -> dict[str, Any]:
    """Build a model, take its loss and gradients on one fixed batch; return numbers that tell it apart."""
    from slipway.trainer.data.batches import GPTBatchBuilder
    from slipway.trainer.data.source import MockSource
    from slipway.trainer.loop.step import StepReduction, train_losses
    from slipway.trainer.model.build import build_model
    from slipway.trainer.model.model import parameter_count
    from slipway.trainer.optim.build import Optimizer

    model = build_model(settings, rank_context, 304)
    optimizer = Optimizer(settings, model, rank_context.device)
    source = MockSource(settings.architecture.seq_length, 300, 1, False)
    batch_builder = GPTBatchBuilder(300, None, settings.micro_batch, rank_context.device)
    windows: list[int | None] = list(range(settings.global_batch))
    loss = StepReduction(train_losses(settings, model, batch_builder.batches(source, windows), 4)).read()[0]
    return {
        "loss": loss,
        "grad_norm": optimizer.step(1e-3),
        "parameters": parameter_count(model),
        "names": [name for name, _ in model.named_parameters()],
        "after": StepReduction(
            train_losses(settings, model, batch_builder.batches(source, windows), 4)
        ).read()[0],
    }


def weight_decay(settings: Settings, rank_context: Any) -> dict[str, list[float]]:
    """Return, for weights and for biases and norms, by how much a step without gradient shrinks them."""
    from slipway.trainer.model.build import build_model
    from slipway.trainer.optim.build import Optimizer

    heavy = replace(settings, optimization=replace(settings.optimization, weight_decay=0.5))
    model = build_model(heavy, rank_context, 304)
    optimizer = Optimizer(heavy, model, rank_context.device)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    model.zero_grad_buffer()
    optimizer.step(0.1)
    weights: dict[str, set[float]] = {"matrices": set(), "vectors": set()}
    for parameter in model.parameters():
        weights["vectors" if parameter.dim() == 1 else "matrices"].update(parameter.unique().tolist())
    return {name: sorted(values) for name, values in weights.items()}


def foreign_token(device: Any) -> str:
    """Return the error for tokens that the vocabulary does not have."""
    from slipway.common.errors import UserError
    from slipway.trainer.data.batches import GPTBatchBuilder
    from slipway.trainer.data.source import MockSource

    try:
        next(GPTBatchBuilder(10, None, 2, device).batches(MockSource(32, 300, 1, False), [0, 1]))
    except UserError as error:
        return str(error)
    return ""


def waits_in_a_step(settings: Settings, rank_context: Any) -> list[int]:
    """Return how often a step reads a value from the device, and how many collectives of ours join all ranks.

    A host waits for a GPU by reading.
    """
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from slipway.trainer.loop.session import open_session
    from tests.trainer.looping import loop_of

    class Counting(TorchDispatchMode):
        read = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.read += operation is torch.ops.aten._local_scalar_dense.default
            return operation(*args, **kwargs or {})

    session, collectives, reduce = open_session(settings, rank_context), [], dist.all_reduce

    def count_collectives(tensor: Any, *arguments: Any, group: Any = None, **options: Any) -> Any:
        collectives.extend([tensor] * (group is None))
        return reduce(tensor, *arguments, group=group, **options)

    with loop_of(session) as loop:
        # The third step is the first one that reports phases.
        for _ in range(2):
            loop.step()
        dist.all_reduce = count_collectives
        with Counting() as counting:
            loop.step()
        dist.all_reduce = reduce
    return [counting.read, len(collectives)]


def overflowing_gradient(settings: Settings, rank_context: Any) -> str:
    """Return the error of a step whose loss is finite and whose gradient is not."""
    from slipway.trainer.errors import DivergedError
    from slipway.trainer.loop.session import open_session
    from tests.trainer.looping import loop_of

    session = open_session(settings, rank_context)
    weight = session.model.chunks[0].module.decoder.final_layernorm.weight
    weight.register_hook(lambda gradient: gradient * float("inf"))
    try:
        with loop_of(session) as loop:
            loop.step()
    except DivergedError as error:
        return str(error)
    return ""


def norm_difference() -> float:
    """Compare a fresh layernorm1p with torch's layer norm."""
    from slipway.trainer.model.layers import ZeroCenteredLayerNorm

    x = torch.randn(3, 16)
    difference = ZeroCenteredLayerNorm(None, 16)(x) - torch.nn.functional.layer_norm(x, (16,))
    return float(difference.abs().max())


def small_scale_counts() -> bool:
    """Return whether layernorm1p in bf16 scales by 1.003, which bf16 does not have."""
    from slipway.trainer.model.layers import ZeroCenteredLayerNorm

    norm, x = ZeroCenteredLayerNorm(None, 512).bfloat16(), torch.randn(3, 512).bfloat16()
    torch.nn.init.constant_(norm.weight, 0.003)
    scale = 1 + norm.weight.float()
    expected = torch.nn.functional.layer_norm(x.float(), (512,), scale).bfloat16()
    plain = torch.nn.functional.layer_norm(x.float(), (512,)).bfloat16()
    return bool((norm(x) == expected).all() and (expected != plain).any())
