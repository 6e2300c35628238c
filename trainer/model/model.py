"""This rank's part of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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
    """

    chunks: list[Any]
    config: Any

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

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the weights by chunk, as megatron-core's sharded tensors, which know their place."""
        return {str(number): chunk.module.sharded_state_dict() for number, chunk in enumerate(self.chunks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over weights in the form of :meth:`sharded_state_dict`."""
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state[str(number)])
