"""The loss of a model on a GPU: cross entropy that keeps the logits as they are, not their softmax in fp32.

A 16-bit logit costs 6 bytes of memory traffic: it is read once forward, and overwritten by its gradient
backward. megatron-core's cross entropy moves 26 bytes, and its fused one 18. Uncompiled and without tensor
parallelism the numbers are megatron-core's to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.jit import jit_fuser


def compute_loss(labels: Any, logits: Any) -> Any:
    """Return the loss of each token, ``[b, s]``, in nats and fp32.

    It stands in for megatron-core's ``compute_language_model_loss``, and ends the life of the logits.

    Parameters
    ----------
    labels
        ``[b, s]``
    logits
        ``[s, b, vocabulary / tensor-parallel ranks]``; this rank's slice.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    losses = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous(), group)
    return losses.transpose(0, 1).contiguous()


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy of logits whose vocabulary is split over a group of ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, group: Any) -> Any:
        first = group.rank() * logits.size(-1)
        top, total, predicted = _reduce_vocabulary(logits, labels, first)
        if group.size() > 1:
            own = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * torch.exp(own - top), predicted))
            dist.all_reduce(sums, group=group)
            total, predicted = sums
        # Without its history, as the backward pass writes into it.
        ctx.save_for_backward(logits.detach(), labels, top, total)
        ctx.first = first
        return (torch.log(total) - (predicted - top)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _overwrite_with_gradient(*ctx.saved_tensors, gradient, ctx.first), None, None


# Compiled on a GPU, as megatron-core's own fused functions are.
@jit_fuser  # type: ignore[untyped-decorator]
def _reduce_vocabulary(logits: Any, labels: Any, first: int) -> tuple[Any, Any, Any]:
    """Return the largest logit of each token, the sum of ``exp(logit - largest)``, and its label's logit.

    Each is ``[s, b, 1]``. The last is 0 for a label of another rank; this one's vocabulary begins at `first`.
    """
    logits = logits.float()
    # The form that the compiler turns into a single pass over the logits.
    top = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - top).sum(dim=-1, keepdim=True)
    places = labels.unsqueeze(-1) - first
    is_here = (places >= 0) & (places < logits.size(-1))
    predicted = logits.gather(-1, torch.where(is_here, places, 0))
    return top, total, torch.where(is_here, predicted, 0.0)


@jit_fuser  # type: ignore[untyped-decorator]
def _overwrite_with_gradient(
    logits: Any, labels: Any, top: Any, total: Any, gradient: Any, first: int
) -> Any:
    """Return the gradient of the logits in their memory: softmax less one-hot label, times the loss's."""
    columns = torch.arange(first, first + logits.size(-1), device=logits.device)
    softmax = torch.exp(logits.float() - top) / total
    return logits.copy_((softmax - (columns == labels.unsqueeze(-1)).float()) * gradient.unsqueeze(-1))
