"""One step, forward and backward, through megatron-core's schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slipway.trainer.config.settings import Settings
from slipway.trainer.data.batches import Batch
from slipway.trainer.loop.batch_building import MicroBatch
from slipway.trainer.model.model import Model


def train_losses(settings: Settings, model: Model, batches: Iterator[MicroBatch], micro_batches: int) -> Any:
    """Accumulate the gradients of a global batch into the model; return this rank's part of its loss.

    Every unmasked token of the global batch weighs the same. Where micro batches have unequal numbers of them
    (``model.data.eod_mask_loss``), megatron-core divides the gradients by their number in the global batch.
    Elsewhere the mean of the micro batches' means is the same, and NeMo computes that.

    Returns
    -------
    Tensor
        The sum of the losses of this rank's tokens in nats, and their number; without masks the mean over its
        micro batches, and 1. ``[2]``, on the device and perhaps not computed yet; 0 on all but the last
        pipeline stage.
    """
    model.train()
    model.zero_grad_buffer()
    sums = _run(settings, model, batches, micro_batches, forward_only=False)
    if not sums or model.config.calculate_per_token_loss:
        return _sum(sums)
    mean = torch.stack([total / count.clamp(min=1) for total, count in sums]).mean()
    return torch.stack((mean, torch.ones_like(mean)))


class StepReduction:
    """The one reduction of a step over all ranks: its loss, the ranks' flags and numbers.

    It is launched between the backward pass and the optimizer, which waits for the norm of the gradient in
    any case: after that the values are on the host, and need no second wait for the device.

    Parameters
    ----------
    loss
        What `train_losses` returned.
    values
        Numbers of this rank, as many on each, that all ranks get from all: a sum in which each rank has its
        own place.
    """

    def __init__(self, loss: Any, flags: Sequence[bool] = (), values: Sequence[float] = ()) -> None:
        on_cuda = loss.device.type == "cuda"
        self._flags, self._width = len(flags), len(values)
        local = [0.0, 0.0, *map(float, flags), *_place(values)]
        contribution = torch.tensor(local, dtype=torch.float64, pin_memory=on_cuda)
        sums = contribution.to(loss.device, non_blocking=True)
        if _is_first_of_its_share():
            sums[:2] += loss
        dist.all_reduce(sums)
        self._host, self._copied = sums, None
        if on_cuda:
            self._host = torch.empty_like(contribution, pin_memory=True).copy_(sums, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[float, list[bool]]:
        """Return the mean loss, and for each flag whether any rank has set it, the same on all ranks."""
        if self._copied is not None:
            self._copied.synchronize()
        total, weight, *flags = self._host[: 2 + self._flags].tolist()
        return total / max(weight, 1.0), [flag > 0 for flag in flags]

    def read_values(self) -> list[list[float]]:
        """Return the values of each rank, after :meth:`read`."""
        table: list[list[float]] = self._host[2 + self._flags :].view(-1, self._width).tolist()
        return table


def gather(values: Sequence[float]) -> list[list[float]]:
    """Return the values of each rank; every rank calls this with as many."""
    table = torch.tensor(_place(values), dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(table)
    rows: list[list[float]] = table.view(dist.get_world_size(), -1).tolist()
    return rows


def _place(values: Sequence[float]) -> list[float]:
    """Return zeros for all ranks' values but this one's: the sum over the ranks is all of them."""
    places = [0.0] * (len(values) * dist.get_world_size())
    begin = len(values) * dist.get_rank()
    places[begin : begin + len(values)] = values
    return places


def _is_first_of_its_share() -> bool:
    # Of the ranks that share sequences and the model all have seen the same loss: one counts.
    return not (parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank())


def evaluate_losses(
    settings: Settings, model: Model, batches: Iterator[MicroBatch], micro_batches: int
) -> Any:
    """Return the loss sum and the number of unmasked tokens over all ranks, ``[2]``, in 64 bits."""
    model.eval()
    with torch.no_grad():
        sums = _run(settings, model, batches, micro_batches, forward_only=True)
    local = _broadcast_from_last_stage(_sum(sums))
    dist.all_reduce(local, group=parallel_state.get_data_parallel_group())
    return local


def _sum(sums: list[tuple[Any, Any]]) -> Any:
    """Return the sums over micro batches, ``[2]``, in 64 bits."""
    if not sums:
        return torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    return torch.stack([torch.stack(pair) for pair in sums]).double().sum(0)


def _run(
    settings: Settings, model: Model, batches: Iterator[MicroBatch], micro_batches: int, forward_only: bool
) -> list[tuple[Any, Any]]:
    """Return the loss sum and the token count of each micro batch; nothing but on the last pipeline stage."""
    # Each chunk runs through the same micro batches, at its own pace.
    iterators = list(itertools.tee(batches, len(model.chunks)))
    many = len(model.chunks) > 1
    results = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if many else iterators[0],
        model=model.chunks if many else model.chunks[0],
        num_microbatches=micro_batches,
        seq_length=settings.architecture.seq_length,
        micro_batch_size=settings.micro_batch,
        forward_only=forward_only,
    )
    return [result["sums"] for result in results]


def _forward(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Any]:
    batch, contexts = next(batches), parallel_state.get_context_parallel_world_size()
    by_token = chunk.config.calculate_per_token_loss
    if contexts > 1:
        assert isinstance(batch, Batch), "a T5 has no context parallelism"
        batch = batch.context_share(parallel_state.get_context_parallel_rank(), contexts)
    losses = chunk(**batch.arguments())

    def reduce(output: Any) -> tuple[Any, ...]:
        total, count = (output.float() * batch.mask).sum(), batch.mask.sum()
        whole = torch.stack((total.detach(), count))
        if contexts > 1:
            # megatron-core adds up the context-parallel ranks' gradients, and their numbers of tokens.
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        sums = {"sums": (whole[0], whole[1])}
        return (total, count.int(), sums) if by_token else (total / whole[1].clamp(min=1), sums)

    return losses, reduce


def _broadcast_from_last_stage(value: Any) -> Any:
    """Return the last pipeline stage's value: it alone has seen the loss."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            value,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return value
