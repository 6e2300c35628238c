"""One attention against another, called by parity_probe.py in a process with megatron-core's groups."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

HEADS, CHANNELS, LENGTH, SEQUENCES = 4, 8, 16, 2


def on_one_rank() -> dict[str, Any]:
    return {
        "attention": compare_backends(),
        "recompute": recomputation_is_bitwise(),
        "gelu": compare_gelus(),
        "choices": choices(),
    }


def on_two_ranks() -> dict[str, Any]:
    """Return by how much the ranks' dropout differs, where their inputs do not."""
    import torch.distributed as dist

    from slipway.trainer.model.attention import SdpaAttention

    output = attend(SdpaAttention, Case(dropout=0.5))[0]
    output_of_first = output.clone()
    dist.broadcast(output_of_first, src=0)
    difference = (output - output_of_first).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return {"ranks": float(difference)}


class Case(SimpleNamespace):
    """One attention; `mask` is None, "some" or "row", which also forbids a row everything."""

    def __init__(self, **changes: Any) -> None:
        plain = {"dropout": 0.0, "groups": HEADS, "causal": True, "keys": LENGTH, "mask": None, "bias": False}
        super().__init__(**{**plain, "scale": None, "dtype": torch.float32, **changes})


def compare_backends() -> dict[str, Any]:
    """Compare SDPA with megatron-core's own attention, forward and backward, in many cases.

    Dropout is compared too: on a CPU both draw the same numbers in the same order.
    """
    from slipway.trainer.model.attention import LocalAttention, SdpaAttention

    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    repeated = True
    for dtype, dropout, groups, (causal, keys), mask, bias, scale in itertools.product(
        worst,
        (0.0, 0.1),
        (HEADS, 2),
        ((True, LENGTH), (False, 24)),
        (None, "some", "row"),
        (False, True),
        (None, 1.0),
    ):
        case = Case(
            dtype=dtype,
            dropout=dropout,
            groups=groups,
            causal=causal,
            keys=keys,
            mask=mask,
            bias=bias,
            scale=scale,
        )
        first, second, expected = (
            attend(SdpaAttention, case),
            attend(SdpaAttention, case),
            attend(LocalAttention, case),
        )
        repeated &= all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        for x, y in zip(first, expected, strict=True):
            worst[dtype] = max(worst[dtype], float((x - y).abs().max() / y.abs().max()))
    return {"fp32": worst[torch.float32], "bf16": worst[torch.bfloat16], "repeated": repeated}


def attend(attention: Any, case: Case) -> list[Any]:
    """Return the output and the gradients of query, key, value and bias, always from the same numbers."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType

    model_parallel_cuda_manual_seed(1)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(case.dtype).requires_grad_()

    query = random(LENGTH, SEQUENCES, HEADS, CHANNELS)
    key, value = (random(case.keys, SEQUENCES, case.groups, CHANNELS) for _ in range(2))
    bias = random(1, HEADS, LENGTH, case.keys) if case.bias else None
    mask = None
    if case.mask:
        mask = torch.rand(SEQUENCES, 1, LENGTH, case.keys, generator=generator) < 0.3
        mask[1, :, 3] |= case.mask == "row"
    module = attention(
        config=configuration(case),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal if case.causal else AttnMaskType.arbitrary,
        attention_type="self",
        softmax_scale=case.scale,
    )
    output = module(query, key, value, mask, attention_bias=bias)
    weights = torch.randn(output.shape, generator=generator).to(case.dtype)
    if case.mask == "row":
        # Padding: what it computes is never used, but it must be a number.
        weights[3, 1] = 0
    output.backward(weights)
    return [output.detach(), *(x.grad for x in (query, key, value, bias) if x is not None)]


def configuration(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS * ranks,
        num_attention_heads=HEADS * ranks,
        num_query_groups=case.groups * ranks,
        tensor_model_parallel_size=ranks,
        kv_channels=CHANNELS,
        attention_dropout=case.dropout,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
    )


def recomputation_is_bitwise() -> bool:
    """Return True if recomputed attention with dropout has bitwise the same gradients."""
    from megatron.core import tensor_parallel

    from slipway.trainer.model.attention import SdpaAttention

    case, original = Case(dropout=0.1), attend(SdpaAttention, Case(dropout=0.1))

    class Checkpointed(SdpaAttention):  # type: ignore[misc]
        def forward(self, query: Any, key: Any, value: Any, mask: Any, attention_bias: Any = None) -> Any:
            once = super().forward
            return tensor_parallel.checkpoint(lambda q, k, v: once(q, k, v, mask), False, query, key, value)

    return all(torch.equal(x, y) for x, y in zip(original, attend(Checkpointed, case), strict=True))


def compare_gelus() -> dict[str, float]:
    """Compare our GELU with the one that megatron-core computes when it fuses, in 64 bits."""
    import torch.nn.functional as F
    from megatron.core.fusions.fused_bias_gelu import bias_gelu

    from slipway.trainer.model.transformer import activation

    shape = SimpleNamespace(activation="gelu", bias=True, bias_activation_fusion=True)
    plain, _ = activation(shape, SimpleNamespace(type="cpu"))
    marker, fused = activation(shape, SimpleNamespace(type="cuda"))
    x = torch.linspace(-6, 6, 10_001, dtype=torch.float64)
    expected = bias_gelu(torch.zeros(()), x)
    return {
        "fused": float((plain(x) - expected).abs().max()),
        "exact": float((F.gelu(x) - expected).abs().max()),
        "marked": float(fused and marker is F.gelu),
    }


def choices() -> dict[str, str]:
    """Return the choice, or the error, for each wish and device, with Transformer Engine and without."""
    from slipway.trainer.model import backends

    original, answers = backends.transformer_engine_problem, {}
    wishes = ("auto", "sdpa", "local", "transformer_engine")
    for absent, backend, engine, kind, dtype, contexts in itertools.product(
        ("", "absent "), wishes, ("-", "te"), ("cpu", "cuda"), ("fp32", "bf16"), (1, 2)
    ):
        problem = "libcudnn" if absent else None
        backends.transformer_engine_problem = lambda problem=problem: problem
        name = f"{absent}{backend} {engine} {kind} {dtype} cp{contexts}"
        answers[name] = _choice(backend, engine == "te", kind, dtype == "bf16", contexts)
    backends.transformer_engine_problem = original
    return answers


def _choice(backend: str, engine: bool, kind: str, bf16: bool, contexts: int) -> str:
    from slipway.common.errors import UserError
    from slipway.trainer.model.backends import attention_backend

    shape = SimpleNamespace(
        attention_backend=backend, transformer_engine=engine, attention_dropout=0.1, position="rope"
    )
    config = SimpleNamespace(bf16=bf16, context_parallel_size=contexts)
    try:
        return attention_backend(shape, config, SimpleNamespace(type=kind))
    except UserError as error:
        return str(error)
