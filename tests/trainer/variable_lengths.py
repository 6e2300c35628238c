"""FlashAttention for sequences of unequal lengths on a CPU, below PyTorch's own checks and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def register() -> None:
    """Give PyTorch's `varlen_attn` kernels for CPUs, which refuse what those of GPUs refuse."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Any,
    key: Any,
    value: Any,
    bounds: Any,
    others: Any,
    longest: int,
    _: int,
    causal: bool,
    scale: float,
    window: list[int],
    grouped: bool = False,
    *unused: Any,
) -> tuple[Any, Any, Any]:
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (query, key, value))
    assert grouped or key.size(1) == query.size(1)
    assert bounds.dtype == torch.int32 and bounds.is_contiguous() and torch.equal(bounds, others)
    assert bounds[0] == 0 and bounds[-1] == len(query)
    assert 0 <= bounds.diff().min() <= bounds.diff().max() <= longest
    assert causal and window == [-1, 0] and not any(unused)
    key, value = _repeat(query, key, value)
    output = torch.cat(
        [
            torch.einsum("nst,tnd->snd", shares, value[first:end].double())
            for first, end, shares in _shares(query, key, bounds, scale)
        ]
    )
    statistics = torch.zeros(query.size(1), len(query))
    return output.to(query.dtype), statistics, torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    bounds: Any,
    others: Any,
    longest: int,
    _: int,
    causal: bool,
    state: Any,
    scale: float,
    window: list[int],
) -> tuple[Any, ...]:
    groups = key.size(1)
    # Below autograd nothing is differentiated: by hand (Dao et al. 2022, appendix B.2).
    key, value, gradients = *_repeat(query, key, value), []
    for first, end, shares in _shares(query, key, bounds, scale):
        of_output, values = (x[first:end].double() for x in (gradient, value))
        of_shares = torch.einsum("snd,tnd->nst", of_output, values)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        gradients.append(
            (
                torch.einsum("nst,tnd->snd", of_scores, key[first:end].double()),
                torch.einsum("nst,snd->tnd", of_scores, query[first:end].double()),
                torch.einsum("nst,snd->tnd", shares, of_output),
            )
        )
    of_query, *others = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    of_key, of_value = (x.unflatten(1, (groups, -1)).sum(2) for x in others)
    return tuple(x.to(query.dtype) for x in (of_query, of_key, of_value))


def _repeat(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    repeat = query.size(1) // key.size(1)
    return key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)


def _shares(query: Any, key: Any, bounds: Any, scale: float) -> Iterator[tuple[int, int, Any]]:
    """Yield the bounds of each document, and how its tokens attend to each other, ``[n, s, s]``."""
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        scores = torch.einsum("snd,tnd->nst", query[first:end].double(), key[first:end].double()) * scale
        later = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        yield first, end, scores.masked_fill(later, float("-inf")).softmax(dim=-1)


def difference_from_mask(tokens: Any, groups: int, dtype: Any, generator: Any) -> float:
    """Return the largest difference of outputs and gradients, relative to the largest number of each.

    A token that is 1 ends a document.
    """
    from megatron.core.transformer.enums import AttnMaskType

    from slipway.trainer.data.batches import document_bounds, document_numbers, forbidden_attention
    from slipway.trainer.model.attention import SdpaAttention
    from tests.trainer.parity.attention_probe import CHANNELS, HEADS, Case, configuration

    documents = document_numbers(tokens, 1)
    rows, length = tokens.shape
    module = SdpaAttention(configuration(Case(groups=groups, dtype=dtype)), 1, AttnMaskType.causal, "self")
    inputs = [
        torch.randn(length, rows, heads, CHANNELS, generator=generator).to(dtype)
        for heads in (HEADS, groups, groups)
    ]
    weights = torch.randn(length, rows, HEADS * CHANNELS, generator=generator).to(dtype)
    results = []
    for mask in (forbidden_attention(documents), document_bounds(documents)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = module(*leaves, mask)
        assert output.is_contiguous()
        output.backward(weights)
        results.append([output.detach(), *(x.grad for x in leaves)])
    return max(
        float((ours - by_mask).abs().max() / by_mask.abs().max())
        for by_mask, ours in zip(*results, strict=True)
        # Of single tokens alone, the gradients of queries and keys are roundings of 0.
        if by_mask.abs().max() > 1e-3
    )
