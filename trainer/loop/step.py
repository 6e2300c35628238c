"""One step, forward and backward, through megatron-core's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.config.settings import Settings
from trainer.data.batches import Batch


def train_losses(settings: Settings, model: Any, batches: Iterator[Batch], micro_batches: int) -> float:
    """Accumulate the gradients of a global batch into the model; return the batch's mean loss.

    As in NeMo, a micro batch's loss is the mean over its unmasked tokens, and the global loss the mean over
    micro batches and data-parallel ranks. In nats per token.
    """
    model.train()
    model.zero_grad_buffer()
    sums = _run(settings, model, batches, micro_batches, forward_only=False)
    return _mean_over_data_parallel(torch.stack([total / count.clamp(min=1) for total, count in sums]).mean())


def evaluate_losses(settings: Settings, model: Any, batches: Iterator[Batch], micro_batches: int) -> Any:
    """Return the loss sum and the number of unmasked tokens over all ranks, ``[2]``, in 64 bits."""
    model.eval()
    with torch.no_grad():
        sums = _run(settings, model, batches, micro_batches, forward_only=True)
    local = torch.stack([torch.stack(pair) for pair in sums]).double().sum(0)
    dist.all_reduce(local, group=parallel_state.get_data_parallel_group())
    return local


def _run(
    settings: Settings, model: Any, batches: Iterator[Batch], micro_batches: int, forward_only: bool
) -> list[tuple[Any, Any]]:
    results = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=batches,
        model=model,
        num_microbatches=micro_batches,
        seq_length=settings.architecture.seq_length,
        micro_batch_size=settings.micro_batch,
        forward_only=forward_only,
    )
    return [result["sums"] for result in results]


def _forward(batches: Iterator[Batch], model: Any) -> tuple[Any, Any]:
    batch = next(batches)
    # The attention is causal by itself: no mask is passed.
    losses = model(batch.tokens, batch.positions, None, labels=batch.labels)

    def reduce(output: Any) -> tuple[Any, dict[str, Any]]:
        total = (output.float() * batch.mask).sum()
        count = batch.mask.sum()
        return total / count.clamp(min=1), {"sums": (total.detach(), count)}

    return losses, reduce


def _mean_over_data_parallel(loss: Any) -> float:
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss.item()) / int(parallel_state.get_data_parallel_world_size())
