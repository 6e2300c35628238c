"""Hugging Face's model directories: the family of a model, and its config.json."""

from __future__ import annotations

from typing import Any, Literal

from trainer.checkpoint.description import Description
from trainer.config.architecture import Architecture
from trainer.errors import UserError

Family = Literal["gpt2", "llama", "stablelm", "t5"]

# Hugging Face's names of our functions (activations.py): its "gelu" is the exact one, and ours the tanh form.
# Trainings of Megatron-LM may have the exact one.
_FUNCTIONS = {
    "gelu": "gelu_new",
    "exact-gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "squared-relu": "relu2",
}
_GATED = {"swiglu": "silu", "geglu": "gelu_new", "reglu": "relu"}


def family_of(description: Description) -> Family:
    """Return the family of Hugging Face's models that computes what a model does.

    Raises
    ------
    UserError
        Naming the key that no such family has, and what would have been valid.
    """
    shape, encoder = description.decoder, description.encoder
    if encoder is not None:
        _check_t5(encoder, shape)
        return "t5"
    if shape.position == "learned_absolute":
        _check_gpt2(shape)
        return "gpt2"
    _check("model", "position_embedding_type", shape.position, ("rope",), "learned_absolute or rope")
    if shape.normalization == "RMSNorm":
        _check_llama(shape)
        return "llama"
    _check_stablelm(shape)
    return "stablelm"


def _check_gpt2(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, tuple(_FUNCTIONS))
    _check("model", "normalization", shape.normalization, ("LayerNorm",), "layernorm or layernorm1p")
    heads = shape.num_attention_heads
    _check("model", "num_query_groups", shape.num_query_groups, (heads,))
    _check("model", "kv_channels", shape.kv_channels * heads, (shape.hidden_size,), "hidden_size / heads")


def _check_llama(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, tuple(_GATED))
    _check("model", "rotary_percentage", shape.rotary_percentage, (1.0,))
    _check_rope(shape)


def _check_stablelm(shape: Architecture) -> None:
    _check("model", "activation", shape.activation, tuple(_GATED))
    _check("model", "bias", shape.bias, (False,))
    _check_rope(shape)
    heads = shape.num_attention_heads
    _check("model", "kv_channels", shape.kv_channels * heads, (shape.hidden_size,), "hidden_size / heads")
    if shape.rope.interleaved:
        _check("model", "rotary_percentage", shape.rotary_percentage, (1.0,))


def _check_rope(shape: Architecture) -> None:
    _check("model", "normalize_attention_scores", shape.normalize_scores, (True,))
    if shape.rope.scaling is not None:
        _check("model", "seq_len_interpolation_factor", shape.rope.interpolation, (None, 1.0))


def _check_t5(encoder: Architecture, decoder: Architecture) -> None:
    for name, shape in (("encoder", encoder), ("decoder", decoder)):
        node = f"model.{name}"
        _check(node, "position_embedding_type", shape.position, ("relative",))
        _check(node, "normalization", shape.normalization, ("RMSNorm",), "rmsnorm")
        _check(node, "bias", shape.bias, (False,))
        _check(node, "normalize_attention_scores", shape.normalize_scores, (False,))
        _check(node, "activation", shape.activation, (*_FUNCTIONS, *_GATED))
        _check(node, "num_query_groups", shape.num_query_groups, (shape.num_attention_heads,))
    same = {
        "ffn_hidden_size": (encoder.ffn_hidden_size, decoder.ffn_hidden_size),
        "num_attention_heads": (encoder.num_attention_heads, decoder.num_attention_heads),
        "kv_channels": (encoder.kv_channels, decoder.kv_channels),
        "activation": (encoder.activation, decoder.activation),
        "layernorm_epsilon": (encoder.norm_epsilon, decoder.norm_epsilon),
    }
    for key, (first, second) in same.items():
        _check("model.decoder", key, second, (first,), f"the encoder's {first}")


def _check(node: str, key: str, value: Any, valid: tuple[Any, ...], words: str = "") -> None:
    if value not in valid:
        expected = words or " or ".join(str(item) for item in valid)
        raise UserError(
            f"{node}.{key}={value}: Hugging Face has no model of this kind with that; expected {expected}"
        )
