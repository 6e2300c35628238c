"""Part of a model on one rank, and the number of parameters of the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class Model:
    """The chunks that this rank computes, each in megatron-core's wrapper for data parallelism.

    Attributes
    ----------
    chunks
        DistributedDataParallel modules, the one nearest to the input first; more than one with virtual
        pipeline stages.
    config
        The TransformerConfig of the (decoder's) layers.
    uncompiled
        Why layers run operation by operation; None if each is one compiled graph.
    """

    chunks: list[Any]
    config: Any
    uncompiled: str | None = None

    def train(self) -> None:
        """Switch dropout on."""
        for chunk in self.chunks:
            chunk.train()

    def eval(self) -> None:
        """Switch dropout off."""
        for chunk in self.chunks:
            chunk.eval()

    def zero_grad_buffer(self) -> None:
        """Forget the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all chunks."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters with their names, which two chunks may share."""
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    @property
    def gathers_late(self) -> bool:
        """Return whether weights are gathered in the forward pass after the optimizer's step.

        Until then a rank has the step's result only in the part of the weights that it updates itself.
        """
        return any(chunk.use_forward_hook for chunk in self.chunks)

    def gather(self) -> None:
        """Gather the weights that the last step updated; every rank calls this."""
        if self.gathers_late:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def gather_early(self) -> Iterator[None]:
        """Gather the weights now, and let forward passes inside use them as they are; every rank calls this.

        Hooks that gather would add collectives to a validation, which one rank may leave early.
        """
        if not self.gathers_late:
            yield
            return
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()

    @contextlib.contextmanager
    def use_ungathered(self) -> Iterator[None]:
        """Let the forward passes inside, those of the first step, use the weights as they are.

        As in Megatron-LM: weights that one rank restored wrongly are not spread to the others.
        """
        if not self.gathers_late:
            yield
            return
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
        start, self.config.param_sync_func = self.config.param_sync_func, None
        yield
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()
        self.config.param_sync_func = start

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the weights by chunk, as megatron-core's sharded tensors; every rank calls this."""
        self.gather()
        return {str(number): chunk.module.sharded_state_dict() for number, chunk in enumerate(self.chunks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over weights in the form of :meth:`sharded_state_dict`."""
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state[str(number)])


def parameter_count(model: Model) -> int:
    """Count the parameters of the whole model, each once; every rank calls this.

    Tensor-parallel slices are added up; the last pipeline stage's copy of tied embeddings is not counted.
    """
    split = whole = 0
    for parameter in model.parameters():
        if getattr(parameter, "shared", False):
            continue
        if getattr(parameter, "tensor_model_parallel", False):
            split += parameter.numel()
        else:
            whole += parameter.numel()
    tensor = int(parallel_state.get_tensor_model_parallel_world_size())
    total = torch.tensor([split * tensor + whole], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return int(total.item())
