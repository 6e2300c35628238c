"""Configurations to estimate the memory of, made of literals: a GPT with Megatron-LM's defaults."""

from __future__ import annotations

from typing import Any

from launcher.estimates.memory import StageMemory, estimate_memory

GIB = 2**30


def training(nodes: int = 1, *, devices: int = 8, optim: str = "adam", **model: Any) -> dict[str, Any]:
    """Return a GPT in bf16 whose attention is fused; `model` are keys of its node."""
    return {
        "trainer": {"num_nodes": nodes, "devices": devices, "accelerator": "gpu", "precision": "bf16"},
        "model": {
            "transformer_engine": True,
            "megatron_amp_O2": True,
            "optim": {"name": optim},
            "data": {},
            **model,
        },
    }


def gpt(
    layers: int, hidden: int, heads: int, *, sequence: int = 2048, vocabulary: int = 51_200, **more: Any
) -> dict[str, Any]:
    """Return the keys of a GPT with learned positions, and an MLP of four times its width."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "encoder_seq_length": sequence,
        "max_position_embeddings": sequence,
        "override_vocab_size": vocabulary,
        **more,
    }


def layout(tensor: int, pipeline: int, micro: int, batch: int, **more: Any) -> dict[str, Any]:
    """Return the keys of a layout."""
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        **more,
    }


def stages(config: dict[str, Any], engine: str = "megatron_lm") -> tuple[StageMemory, ...]:
    """Return the estimate, which must exist."""
    estimate = estimate_memory(config, config["trainer"]["num_nodes"], engine)
    assert estimate is not None
    return estimate
