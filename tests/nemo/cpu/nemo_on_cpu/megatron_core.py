"""megatron-core 0.12 without CUDA, apex and Transformer Engine, and with a torch newer than itself."""

from __future__ import annotations

import inspect
from typing import Any

from nemo_on_cpu.hooks import after_import


@after_import("megatron.core.tensor_parallel.random")
def _random_state_of_the_cpu(random: Any) -> None:
    import torch

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


@after_import("megatron.core.optimizer")
def _adam_without_kernels(optimizer: Any) -> None:
    from megatron.core.optimizer import distrib_optimizer

    from nemo_on_cpu.adam import FusedAdam

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    # For FP8 alone; it needs Transformer Engine even when there is nothing to do.
    distrib_optimizer.quantize_param_shard = lambda *_, **__: None


@after_import("megatron.core.dist_checkpointing.strategies.filesystem_async")
def _format_of_checkpoints(module: Any) -> None:
    """Pass torch, from 2.7 on, the format that earlier versions wrote by default."""
    write_item = module._write_item
    if "serialization_format" not in inspect.signature(write_item).parameters:
        return
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    def write(*arguments: Any) -> Any:
        return write_item(*arguments, serialization_format=SerializationFormat.TORCH_SAVE)

    module._write_item = write


@after_import("megatron.core.models.T5.t5_spec")
def _norm_of_t5(spec: Any) -> None:
    """Replace Transformer Engine's norm at the end of T5's local layers."""
    if not spec.HAVE_TE:
        spec.TENorm = spec.LNImpl


@after_import("megatron.core.fusions.fused_softmax")
def _masks_of_transformer_engine(fused_softmax: Any) -> None:
    """Build whole masks from those for Transformer Engine: NeMo passes the padding of one or both sides.

    Plain attention needs the whole mask, the future included.
    """
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    softmax = fused_softmax.FusedScaleMaskSoftmax
    forward = softmax.forward

    def forward_with_whole_mask(self: Any, scores: Any, mask: Any) -> Any:
        if isinstance(mask, tuple):
            queries, keys = mask
            mask = queries.transpose(-1, -2) | keys
        elif mask is not None and self.attn_mask_type is AttnMaskType.causal:
            length = scores.shape[-1]
            mask = mask | torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        return forward(self, scores, mask)

    softmax.forward = forward_with_whole_mask
