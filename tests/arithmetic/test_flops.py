"""FLOPs of models: by hand, by the formulas of papers, and as trainings were published."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.arithmetic.flops import layer_flops, sample_flops
from slipway.arithmetic.gpus import peak_flops


def stack(layers: int, hidden: int, heads: int, **changes: Any) -> dict[str, Any]:
    """Return NeMo's keys of a stack of layers."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "ffn_hidden_size": 4 * hidden, "activation": "gelu", **changes}


def gpt(layers: int, hidden: int, heads: int, length: int, **changes: Any) -> dict[str, Any]:
    return stack(layers, hidden, heads, encoder_seq_length=length, **changes)


def test_grouped_queries_and_a_gated_mlp_are_counted_by_hand() -> None:
    sizes = {"num_query_groups": 1, "kv_channels": 4, "ffn_hidden_size": 16, "activation": "fast-swiglu"}
    small = gpt(2, 8, 2, 4, **sizes)
    queries_and_output, keys_and_values, scores_and_values, mlp = 1024, 512, 512, 3072
    assert layer_flops(small, 4) == queries_and_output + keys_and_values + scores_and_values + mlp
    logits = 2048
    assert sample_flops(small, 32) == 3 * (2 * 5120 + logits) == 36864


def test_cross_attention_of_a_t5_is_counted_by_hand() -> None:
    layer = stack(1, 8, 2, ffn_hidden_size=16)
    assert layer_flops(layer, 6) == 1536 + 1536 + 1152 + 3072
    own, cross, mlp = 768 + 768 + 288, 768 + 1536 + 576, 1536
    assert layer_flops(layer, 3, context=6) == own + cross + mlp
    t5 = {"encoder": layer, "decoder": layer, "seq_length": 6, "data": {"seq_length_dec": 3}}
    assert sample_flops(t5, 16, "t5") == 3 * (7296 + 6240 + 768)
    assert sample_flops(t5, 16, "t5") - sample_flops(t5, 16, "t5", causal=True) == 3 * 288 // 2


def test_causal_attention_counts_half_of_the_scores() -> None:
    model = gpt(2, 8, 2, 16)
    scores = 4 * 16**2 * 8
    assert layer_flops(model, 16) - layer_flops(model, 16, causal=True) == scores // 2
    assert sample_flops(model, 304) - sample_flops(model, 304, causal=True) == 3 * 2 * scores // 2


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "gpus", "seconds", "mfu"),
    [
        (48, 6144, 64, 4, 8, 1.10, 41.5),
        (96, 12288, 96, 64, 64, 13.75, 51.4),
        (105, 20480, 128, 280, 280, 37.83, 56.0),
        (128, 25600, 160, 512, 512, 71.49, 56.3),
    ],
)
def test_mfu_is_the_published_one(
    layers: int, hidden: int, heads: int, batch: int, gpus: int, seconds: float, mfu: float
) -> None:
    """Korthikanti et al. 2022, table 5: 22B to 1T on A100s; the seconds have three digits."""
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "bf16")
    assert peak == 312e12
    flops = sample_flops(gpt(layers, hidden, heads, 2048), 51200)
    assert 100 * flops * batch / seconds / gpus / peak == pytest.approx(mfu, rel=5e-3)


def test_formula_3_of_narayanan_holds() -> None:
    """For 175B: 96 B s l h² (1 + s/6h + V/16lh), which also counts that all layers are recomputed."""
    large = gpt(96, 12288, 96, 2048)
    recomputed = sample_flops(large, 51200) + 96 * layer_flops(large, 2048)
    formula = 96 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert recomputed == pytest.approx(formula, rel=1e-12)
    # Section 5.1: at 140 TFLOP/s on each of 1,024 GPUs, 300 billion tokens take 34 days.
    assert recomputed / 2048 * 300e9 / (1024 * 140e12) / 86400 == pytest.approx(34, abs=1)


def test_formula_of_nemo_for_llama_holds() -> None:
    """NeMo 2.4, flops_formulas.llama2, for the 7b."""
    llama = gpt(32, 4096, 32, 4096, ffn_hidden_size=11008, activation="swiglu")
    formula = 4096 * 32 * 4096**2 * (12 + 12 + 18 * 11008 / 4096 + 12 + 6 * 32000 / (32 * 4096))
    assert sample_flops(llama, 32000) == pytest.approx(formula, rel=1e-12)


def test_mfu_of_palm_is_the_published_one() -> None:
    """Chowdhery et al. 2022 (arXiv:2204.02311), section 4.1: 238.3K tokens/s on 6,144 TPU v4, 46.2 %."""
    sizes = {"num_query_groups": 1, "kv_channels": 256, "activation": "swiglu"}
    palm = gpt(118, 18432, 48, 2048, **sizes)
    assert sample_flops(palm, 256_000) / 2048 * 238.3e3 / (6144 * 275e12) == pytest.approx(0.462, rel=0.005)
