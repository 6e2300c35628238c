"""The choice of the attention: Transformer Engine's, PyTorch's fused kernel, or megatron-core's own."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import Architecture, AttentionBackend
from slipway.trainer.config.settings import Settings
from slipway.trainer.model.attention import LocalAttention, SdpaAttention

_KEY = "model.attention_backend"


def attention_backend(shape: Architecture, config: TransformerConfig, device: Any) -> AttentionBackend:
    """Choose for one stack of layers: the key's value, or else the fastest that can compute it.

    Raises
    ------
    UserError
        If the backend that the key names cannot compute this.
    """
    backend = shape.attention_backend
    if backend != "auto":
        if (obstacle := _obstacle(backend, config, device)) is not None:
            raise UserError(f"{_KEY}={backend}: {obstacle}")
        return backend
    if shape.transformer_engine and _obstacle("transformer_engine", config, device) is None:
        return "transformer_engine"
    if device.type == "cuda" or config.context_parallel_size > 1 or _sdpa_is_faster_on_cpu(shape, config):
        return "sdpa"
    return "local"


def core_attention(shape: Architecture, config: TransformerConfig, device: Any) -> type:
    """Return the class for a layer spec's `core_attention`; see `attention_backend`."""
    backend = attention_backend(shape, config, device)
    if backend == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention  # type: ignore[no-any-return]
    return SdpaAttention if backend == "sdpa" else LocalAttention


def uses_transformer_engine(shape: Architecture, device: Any) -> bool:
    """Return whether the layers are Transformer Engine's: asked for, on a CUDA device, and importable."""
    return shape.transformer_engine and device.type == "cuda" and transformer_engine_problem() is None


@cache
def transformer_engine_problem() -> str | None:
    """Return why Transformer Engine cannot be used, by importing it as megatron-core does; None if it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Its libraries are loaded at import: besides ImportError, the loader raises errors of any kind.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return None if HAVE_TE else "megatron-core cannot import all of it that it needs"


@cache
def has_apex_accumulation() -> bool:
    """Return whether Apex's product that adds to a gradient is there, for megatron-core's own layers."""
    try:
        importlib.import_module("fused_weight_gradient_mlp_cuda")
    except Exception:
        return False
    return True


def fuse_accumulation(chunks: list[Any]) -> None:
    """Have Transformer Engine's layers add to the gradients of their weights as they multiply.

    They do so without Apex. megatron-core asks them only together with its own layers; only the head is
    one of these, and they need Apex (tensor_parallel/layers.py).
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def overlaps_tensor(settings: Settings, device: Any) -> bool:
    """Return whether tensor-parallel ranks exchange while they multiply: asked for, and possible.

    As in NeMo, without sequence parallelism it is off.
    """
    parallel = settings.parallel
    return (
        parallel.overlap_tensor
        and parallel.sequence
        and uses_transformer_engine(settings.architecture, device)
    )


def start_tensor_overlap(settings: Settings) -> None:
    """Make Transformer Engine's buffers through which tensor-parallel ranks exchange; every rank calls this.

    As Megatron-LM 0.16.1 does once there are groups (initialize.py, `_initialize_tp_communicators`).
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    modes, parallel = base.UserBufferQuantizationMode, settings.parallel
    base.initialize_ub(
        shape=[
            settings.seq_length * settings.micro_batch // parallel.context,
            settings.architecture.hidden_size,
        ],
        tp_size=parallel.tensor,
        quantization_modes=[modes.FP8 if settings.fp8 else modes.NONE],
        ub_cfgs={},
        bootstrap_backend="nccl",
    )


def _obstacle(backend: AttentionBackend, config: TransformerConfig, device: Any) -> str | None:
    """Return why a backend cannot compute this, or None."""
    if backend == "local" and config.context_parallel_size > 1:
        return f"it has no context parallelism; expected {_KEY}=transformer_engine, sdpa or auto"
    if backend != "transformer_engine":
        return None
    if device.type != "cuda":
        return "it needs a CUDA device; expected auto, sdpa or local"
    problem = transformer_engine_problem()
    return problem and f"it is not importable here ({problem}); expected auto, sdpa or local"


def _sdpa_is_faster_on_cpu(shape: Architecture, config: TransformerConfig) -> bool:
    # As measured, see the documentation. PyTorch has a fused kernel for CPUs without dropout and without the
    # gradient of a bias; otherwise it computes bf16 in 32 bits, and megatron-core is quicker.
    return not config.bf16 or (shape.attention_dropout == 0 and shape.position != "relative")
