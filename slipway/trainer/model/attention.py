"""The attention inside a layer: PyTorch's fused kernel, or megatron-core's own matrices.

Both are core-attention modules for a megatron-core layer spec, with the arguments of its
`DotProductAttention`. Shapes here: ``s`` tokens of the query, ``t`` of the keys, ``b`` sequences, ``n`` heads
and ``g`` query groups of this tensor-parallel rank, ``d`` channels of a head.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Softmax attention by `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    config
        The model's; `kv_channels`, `attention_dropout` and `context_parallel_size` are read.
    layer_number
        Counted from 1; unused, specs pass it.
    attn_mask_type
        `causal` needs no mask.
    attention_type
        Unused, as in megatron-core.
    attention_dropout
        Probability, instead of the configuration's.
    softmax_scale
        Factor of the scores, instead of ``1 / sqrt(kv_channels)`` (Vaswani et al. 2017, eq. 1); 1 for T5.
    cp_comm_type
        Unused: keys and values are gathered.
    pg_collection
        Process groups, instead of the global ones.

    Raises
    ------
    ValueError
        If the configuration asks for what only Transformer Engine or megatron-core's own attention has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("a window or an offset of the softmax needs megatron-core's local attention")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.causal = attn_mask_type == AttnMaskType.causal
        self.contexts = groups.cp if config.context_parallel_size > 1 else None
        if self.contexts and not self.causal:
            raise ValueError("context parallelism is for causal attention")

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query
            ``[s, b, n, d]``.
        key, value
            ``[t, b, g, d]``; n/g neighbouring heads of the query share a group.
        attention_mask
            True where attention is forbidden, broadcastable to ``[b, n, s, t]``, or the result
            of `make_added_mask`; None forbids nothing, or with a causal module what lies ahead. Or, with one
            dimension, the bounds of documents; see `attend_documents`.
        attn_mask_type
            Unused, as in megatron-core: the module's own decides.
        attention_bias
            Added to the scaled scores, broadcastable to ``[b, n, s, t]``, or None.
        packed_seq_params
            Only None.

        Returns
        -------
        Tensor
            ``[s, b, n * d]``.
        """
        if packed_seq_params is not None:
            raise ValueError("packed sequences need Transformer Engine's attention")
        if attention_mask is not None and attention_mask.dim() == 1:
            return attend_documents(query, key, value, attention_mask, self.scale)
        dropout = self.dropout if self.training else 0.0
        mask, causal = attention_mask, False
        if self.contexts:
            if attention_mask is not None or attention_bias is not None:
                raise ValueError("under context parallelism attention has neither a mask nor a bias")
            key, value = gather_tokens(key, self.contexts), gather_tokens(value, self.contexts)
            mask = _mask_ahead_of_rank(
                query.size(0), self.contexts.rank(), self.contexts.size(), query.device, query.dtype
            )
        elif self.causal and attention_mask is None and query.size(0) > 1:
            causal = attention_bias is None
            mask = None if causal else _mask_ahead(query.size(0), query.device)
        mask = _add_bias(mask, attention_bias, query.dtype)
        if mask is not None and query.is_cuda:
            # With a mask, not all of PyTorch's kernels for GPUs take fewer heads of keys than of queries; the
            # one that is left holds the scores in memory.
            key, value = repeat_groups(key, query.size(2)), repeat_groups(value, query.size(2))
        with self._generator() if dropout else contextlib.nullcontext():
            context = torch.nn.functional.scaled_dot_product_attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=key.size(2) != query.size(2),
            )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _generator(self) -> Any:
        # As in megatron-core: heads differ between tensor-parallel ranks, and so must their dropout. Under
        # sequence parallelism the whole layer runs inside this fork already. A compiled layer, which no rank
        # shares, needs none, and cannot change generators.
        if self.config.sequence_parallel or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def attend_documents(query: Any, key: Any, value: Any, bounds: Any, scale: float) -> Any:
    """Attend causally within documents, by a kernel that skips what lies beyond them; without dropout.

    Parameters
    ----------
    query, key, value
        As for `SdpaAttention`.
    bounds
        ``[documents + 1]``, int32: see `document_bounds` of the batches.

    Returns
    -------
    Tensor
        ``[s, b, n * d]``
    """
    # Late: it imports the compiler.
    from torch.nn.attention.varlen import varlen_attn

    length, rows = query.shape[:2]
    packed = [x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)]
    grouped = {"enable_gqa": True} if key.size(2) != query.size(2) else {}
    # The longest document's length is on the device: that of a sequence is as right, and a constant.
    context = varlen_attn(
        *packed, bounds, bounds, length, length, scale=scale, window_size=(-1, 0), **grouped
    )
    return context.view(rows, length, -1).transpose(0, 1).contiguous()


class LocalAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's own attention, which has no bias, with a bias.

    The arguments are those of `SdpaAttention`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale_mask_softmax: Any = _BiasedSoftmax(self.scale_mask_softmax)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        """Attend; see `SdpaAttention.forward`."""
        self.scale_mask_softmax.bias = attention_bias
        try:
            return super().forward(query, key, value, attention_mask, attn_mask_type, None, packed_seq_params)
        finally:
            self.scale_mask_softmax.bias = None


class _BiasedSoftmax(torch.nn.Module):  # type: ignore[misc]
    """megatron-core's masked softmax of scores ``[b, n, s, t]``, to which a bias is added first."""

    def __init__(self, softmax: Any) -> None:
        super().__init__()
        self.softmax, self.bias = softmax, None

    def forward(self, scores: Any, mask: Any, offset: Any = None) -> Any:
        return self.softmax(scores if self.bias is None else scores + self.bias, mask, offset)


def _mask_ahead(length: int, device: Any) -> Any:
    """Return ``[length, length]``, True where a token would attend to a later one."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def make_added_mask(forbidden: Any, dtype: Any) -> Any:
    """Return the addend of the scores: 0, and a low number where `forbidden` is True.

    PyTorch makes such a mask of a boolean one in every call, and keeps it for the backward pass: made once,
    it is kept once for all layers. The number is finite, so that a row of padding, where all is forbidden,
    attends to everything alike, as it does in megatron-core, and is not NaN. Half of the lowest number leaves
    room for kernels that multiply it by log2(e).
    """
    return torch.zeros((), dtype=dtype, device=forbidden.device).masked_fill(forbidden, _lowest(dtype))


def share_mask(block: Any) -> None:
    """Have a stack of layers with `SdpaAttention` make its added mask once, rather than in each layer."""

    def convert(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() == 1:
            return args, kwargs
        return args, {**kwargs, "attention_mask": make_added_mask(mask, block.config.params_dtype)}

    block.register_forward_pre_hook(convert, with_kwargs=True)


def repeat_groups(x: Any, heads: int) -> Any:
    """Return ``[t, b, heads, d]`` from ``[t, b, g, d]``: the keys or values of each head's group."""
    return x if x.size(2) == heads else x.repeat_interleave(heads // x.size(2), dim=2)


def _add_bias(mask: Any, bias: Any, dtype: Any) -> Any:
    """Return the addend of the scores for a boolean mask, an added mask, or a bias; None for neither."""
    if mask is None:
        return None if bias is None else bias.to(dtype)
    if mask.dtype == torch.bool:
        return (
            make_added_mask(mask, dtype) if bias is None else bias.to(dtype).masked_fill(mask, _lowest(dtype))
        )
    return mask if bias is None else mask + bias.to(dtype)


def _lowest(dtype: Any) -> float:
    return float(torch.finfo(dtype).min) / 2


def gather_tokens(x: Any, group: Any) -> Any:
    """Return ``[t, ...]``, all tokens in their order, from this rank's ``[t / ranks, ...]``.

    Context parallelism for an attention without it: each rank gathers the keys and values of all, as in
    the training of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2). The keys of grouped
    queries are few, and any mask is possible. A rank's tokens are two chunks of the sequence, one from either
    end, so that all ranks have as much causal attention to compute. The gradient is the sum of the ranks'.
    """
    gathered = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    chunks = gathered.chunk(2 * group.size(), dim=0)
    # They come as 0, last, 1, last but one, ...
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim=0)


# All layers have the same, of training and of validation.
@functools.lru_cache(maxsize=2)
def _mask_ahead_of_rank(length: int, rank: int, ranks: int, device: Any, dtype: Any) -> Any:
    """Return the added mask, ``[length, length * ranks]``, of the tokens ahead of one rank's."""
    half = length // 2
    starts = (rank * half, (2 * ranks - 1 - rank) * half)
    own = torch.cat([torch.arange(start, start + half, device=device) for start in starts])
    return make_added_mask(torch.arange(length * ranks, device=device) > own[:, None], dtype)
