"""The kernels of PyTorch's attention on a GPU: their order, the one that is taken, and that for documents.

Speed, roundings and the draws of dropout depend on the kernel, and that on the versions of PyTorch and cuDNN,
the GPU and the deterministic mode.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipway.trainer.config.settings import Settings
from slipway.trainer.model.backends import attention_backend

# Where cuDNN's is PyTorch's own first choice from 2.11 on (sdp_utils.cpp): Hopper and the Blackwell of data
# centers, with cuDNN 9.15.1 or newer.
_MAJORS, _CUDNN = (9, 10), 91501


def order_kernels(capability: tuple[int, int], cudnn: int | None, is_deterministic: bool) -> list[SDPBackend]:
    """Return the kernels that a GPU may use, the fastest first.

    One that cannot compute a call is passed over. cuDNN's is not deterministic.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if not is_deterministic:
        is_fastest = capability[0] in _MAJORS and (cudnn or 0) >= _CUDNN
        kernels.insert(0 if is_fastest else len(kernels), SDPBackend.CUDNN_ATTENTION)
    return [*kernels, SDPBackend.MATH]


@contextlib.contextmanager
def use_ordered_kernels(device: Any) -> Iterator[None]:
    """Have PyTorch's attention on a GPU try its kernels in our order, not in that of its version."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(_allowed(device), set_priority=True):
        yield


def takes_lengths(settings: Settings, device: Any) -> bool:
    """Return whether attention takes documents by their lengths, not by a mask of ``[s, s]``.

    FlashAttention does in 16 bits, and PyTorch's function for it has no dropout.
    """
    shape = settings.architecture
    return (
        device.type == "cuda"
        and shape.attention_backend != "local"
        and settings.precision == "bf16"
        and shape.attention_dropout == 0
        and shape.kv_channels % 8 == 0
        and shape.kv_channels <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        and _has_variable_lengths(shape.num_query_groups != shape.num_attention_heads)
    )


def describe_attention(settings: Settings, config: TransformerConfig, device: Any) -> str:
    """Return the backend of attention; of PyTorch's also the kernel for a micro batch, and those allowed."""
    backend = attention_backend(settings.architecture, config, device)
    if backend != "sdpa":
        return backend
    has_mask = config.context_parallel_size > 1 or settings.architecture.position == "relative"
    text = _choose(settings, config, device, has_mask)
    if settings.data.reset_attention and config.context_parallel_size == 1:
        masked = f"{_choose(settings, config, device, True)} by a mask"
        text += f", documents: {'flash by lengths' if takes_lengths(settings, device) else masked}"
    if device.type == "cuda":
        text += f"; allowed: {', '.join(map(_name, _allowed(device)))}"
    return f"sdpa ({text})"


def _allowed(device: Any) -> list[SDPBackend]:
    return order_kernels(
        torch.cuda.get_device_capability(device),
        torch.backends.cudnn.version(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _choose(settings: Settings, config: TransformerConfig, device: Any, has_mask: bool) -> str:
    """Return the kernel that PyTorch chooses for the shapes of a micro batch; nothing is computed."""
    shape, tensor = settings.architecture, settings.parallel.tensor
    heads, groups = shape.num_attention_heads // tensor, max(shape.num_query_groups // tensor, 1)
    keys = shape.seq_length
    queries = keys // config.context_parallel_size
    options = {"dtype": config.params_dtype, "device": device}

    def make(length: int, heads: int) -> Any:
        x = torch.empty(length, settings.micro_batch, heads, shape.kv_channels, **options)
        return x.requires_grad_().permute(1, 2, 0, 3)

    mask = None
    if has_mask:
        # The biases of relative positions are learned.
        mask = torch.empty(1, 1, queries, keys, **options).requires_grad_(shape.position == "relative")
        groups = heads if device.type == "cuda" else groups
    choice = torch._fused_sdp_choice(
        make(queries, heads),
        make(keys, groups),
        make(keys, groups),
        attn_mask=mask,
        dropout_p=shape.attention_dropout,
        is_causal=not has_mask,
        enable_gqa=groups != heads,
    )
    return _name(SDPBackend(choice))


def _name(kernel: SDPBackend) -> str:
    return str(kernel.name).removesuffix("_ATTENTION").lower()


def _has_variable_lengths(is_grouped: bool) -> bool:
    """Return whether this PyTorch has the function for documents, with the arguments that we pass."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    needed = {"scale", "window_size"} | ({"enable_gqa"} if is_grouped else set())
    return needed <= inspect.signature(varlen_attn).parameters.keys()
