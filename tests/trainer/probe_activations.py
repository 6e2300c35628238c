"""The bytes that megatron-core keeps in memory; run by test_activation_bytes.py in a warm process.

There is one process. The other ranks are pretended ones, whose messages never come: the numbers are
wrong, and all sizes are right.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipway.trainer.config.layout import make_layout
from slipway.trainer.config.settings import Settings, read_settings
from slipway.trainer.world import World


def main(arguments: list[str]) -> int:
    """Answer the questions of one file in another."""
    questions: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
    dist.init_process_group("fake", rank=0, world_size=questions["ranks"], store=FakeStore())
    as_on_a_gpu()
    activations = {
        name: kept_bytes(read_settings(flat), questions) for name, flat in questions["activations"].items()
    }
    states = {name: states_of(read_settings(flat), questions) for name, flat in questions["states"].items()}
    Path(arguments[1]).write_text(json.dumps({"activations": activations, "states": states}))
    return 0


def as_on_a_gpu() -> None:
    """Choose the kernels that keep for the backward pass what those of a GPU keep.

    The fused functions of the MLP; masks of dropout that take a byte; a norm by root mean squares that keeps
    its input and a number for each token.
    """
    from slipway.trainer.model import build, transformer
    from slipway.trainer.model.transformer import activation
    from slipway.trainer.optim import build as optimizer

    transformer.activation = lambda shape, device: activation(shape, torch.device("cuda"))  # type: ignore[attr-defined]
    torch.nn.functional.dropout = lambda x, p=0.5, training=True, inplace=False: (
        torch.native_dropout(x, p, True)[0] if training and p else x
    )
    # Nobody answers.
    build.run_on_all_ranks = lambda action: action()  # type: ignore[attr-defined]
    torch.nn.functional.rms_norm = lambda x, shape, weight=None, eps=None: _RmsNorm.apply(x, weight)
    # With the Adam of Transformer Engine or Apex, which keeps as much as torch's.
    build.uses_distributed_optimizer = optimizer.uses_distributed_optimizer = lambda settings, device: (
        settings.optimization.name in optimizer.DISTRIBUTED_OPTIMIZERS
    )


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, x[..., :1].float(), weight)
        return x * weight


class SavedTensor:
    """A tensor that a node of autograd's graph keeps, for as long as there is the node."""

    living: ClassVar[weakref.WeakSet[SavedTensor]] = weakref.WeakSet()

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.living.add(self)


def build_on_ranks(settings: Settings, questions: dict[str, Any]) -> Any:
    from megatron.core import parallel_state

    from slipway.trainer.distributed import make_rank_context
    from slipway.trainer.model import build

    parallel_state.destroy_model_parallel()
    rank_context = make_rank_context(
        World.from_environment({}), make_layout(settings, questions["ranks"]), torch.device("cpu")
    )
    vocabulary = settings.configuration.get("model.override_vocab_size", questions["vocabulary"])
    return build.build_model(settings, rank_context, vocabulary, teacher=teacher_of(settings, vocabulary))


def teacher_of(settings: Settings, vocabulary: int) -> Any:
    """Return a teacher without weights; None if the settings have none."""
    from slipway.trainer.checkpoint.description import describe
    from slipway.trainer.conversion.teacher import Teacher
    from slipway.trainer.data.vocabulary import Vocabulary

    class Untrained(Teacher):
        def fill(self, state: Any, layers: Any) -> None:
            """Leave the weights as they are."""

    if settings.distillation is None:
        return None
    description = describe(settings, Vocabulary(vocabulary, 0, "a test"), vocabulary)
    deep = replace(description.decoder, num_layers=settings.distillation.sizes["num_layers"])
    return Untrained(Path(), replace(description, decoder=deep), is_ours=True)


def kept_bytes(settings: Settings, questions: dict[str, Any]) -> int:
    """Return the bytes kept between a micro batch's forward and backward pass, except for the weights."""
    model = build_on_ranks(settings, questions)
    model.train()
    SavedTensor.living.clear()
    with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda saved: saved.tensor):
        loss = model.chunks[0](**arguments(settings))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    storages = [saved.tensor.untyped_storage() for saved in SavedTensor.living]
    del loss
    return sum(
        {
            storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in weights
        }.values()
    )


def arguments(settings: Settings) -> dict[str, Any]:
    length = settings.architecture.seq_length
    tokens = torch.zeros(settings.micro_batch, length, dtype=torch.long)
    if settings.encoder is None:
        positions = torch.arange(length).expand_as(tokens)
        return {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": tokens}
    from slipway.trainer.data.denoising import T5Batch

    source = torch.zeros(settings.micro_batch, settings.encoder.seq_length, dtype=torch.long)
    return T5Batch(source, tokens, tokens, None).arguments()


def states_of(settings: Settings, questions: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states after a step, and the parameters."""
    from slipway.trainer.optim.build import Optimizer

    model = build_on_ranks(settings, questions)
    optimizer = Optimizer(settings, model, torch.device("cpu"))
    model.zero_grad_buffer()
    optimizer.step(0.1)
    parts = (part for chunk in model.chunks for part in chunk.modules())
    teachers = (teacher for part in parts for teacher in getattr(part, "_teacher", ()))
    held = (*model.parameters(), *(weight for teacher in teachers for weight in teacher.parameters()))
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in held}
    gradients = [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]
    states: dict[int, int] = {}
    for part in getattr(optimizer.inner, "chained_optimizers", [optimizer.inner]):
        adam = part.optimizer
        tensors = [p for group in adam.param_groups for p in group["params"]]
        tensors += [
            x for state in adam.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()
        ]
        states |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "weights": sum(weights.values()),
        "gradients": sum(x.untyped_storage().nbytes() for x in gradients),
        "optimizer": sum(size for pointer, size in states.items() if pointer not in weights),
    }
