"""The shape of a GPT model, from NeMo's ``model.*`` keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.values import Values
from trainer.errors import UserError

ACTIVATIONS = ("gelu", "geglu", "reglu", "swiglu", "relu", "silu", "squared-relu")
NORMALIZATIONS = ("layernorm", "layernorm1p", "rmsnorm")
POSITIONS = ("learned_absolute", "rope", "none")


@dataclass(frozen=True)
class Recompute:
    """Which activations are computed twice rather than kept, in megatron-core's words."""

    granularity: Literal["full", "selective"]
    method: Literal["uniform", "block"] | None
    num_layers: int | None


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer; sizes count elements, `seq_length` tokens."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_positions: int
    position: Literal["learned_absolute", "rope", "none"]
    rotary_percentage: float
    rotary_base: int
    activation: str
    normalization: Literal["LayerNorm", "RMSNorm"]
    zero_centered_gamma: bool
    norm_epsilon: float
    bias: bool
    tied_embeddings: bool
    vocab_divisor: int
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    scaled_init: bool
    fp32_residual: bool
    bias_activation_fusion: bool
    bias_dropout_fusion: bool
    transformer_engine: bool
    recompute: Recompute | None


def read_architecture(values: Values) -> Architecture:
    """Read and cross-check the sizes.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    hidden = values.integer("model.hidden_size", minimum=1)
    heads = values.integer("model.num_attention_heads", minimum=1)
    seq_length = _seq_length(values)
    normalization = values.choice("model.normalization", NORMALIZATIONS, "layernorm")
    one_plus = values.flag("model.layernorm_zero_centered_gamma", False) or normalization == "layernorm1p"
    if one_plus and normalization == "rmsnorm":
        raise UserError(
            "model.layernorm_zero_centered_gamma=True: only valid with a layer norm, not with rmsnorm"
        )
    position = values.choice("model.position_embedding_type", POSITIONS, "learned_absolute")
    return Architecture(
        num_layers=values.integer("model.num_layers", minimum=1),
        hidden_size=hidden,
        ffn_hidden_size=values.integer("model.ffn_hidden_size", 4 * hidden, minimum=1),
        num_attention_heads=heads,
        num_query_groups=_query_groups(values, heads),
        kv_channels=_kv_channels(values, hidden, heads),
        seq_length=seq_length,
        max_positions=_max_positions(values, seq_length),
        position="rope" if position == "rope" else "none" if position == "none" else "learned_absolute",
        rotary_percentage=values.number("model.rotary_percentage", 1.0, minimum=0.0),
        rotary_base=values.integer("model.rotary_base", 10000, minimum=1),
        activation=_activation(values),
        normalization="RMSNorm" if normalization == "rmsnorm" else "LayerNorm",
        zero_centered_gamma=one_plus,
        norm_epsilon=values.number("model.layernorm_epsilon", 1e-5, minimum=0.0),
        bias=values.flag("model.bias", True),
        tied_embeddings=values.flag("model.share_embeddings_and_output_weights", True),
        vocab_divisor=values.integer("model.make_vocab_size_divisible_by", 128, minimum=1),
        hidden_dropout=values.number("model.hidden_dropout", 0.1, minimum=0.0, below=1.0),
        attention_dropout=values.number("model.attention_dropout", 0.1, minimum=0.0, below=1.0),
        init_std=values.number("model.init_method_std", 0.02, minimum=0.0),
        scaled_init=values.flag("model.use_scaled_init_method", True),
        fp32_residual=values.flag("model.fp32_residual_connection", False),
        bias_activation_fusion=values.flag("model.bias_activation_fusion", True),
        bias_dropout_fusion=values.flag("model.bias_dropout_add_fusion", True),
        transformer_engine=values.flag("model.transformer_engine", False),
        recompute=_recompute(values),
    )


def _seq_length(values: Values) -> int:
    length = values.integer("model.encoder_seq_length", minimum=1)
    data_length = values.integer("model.data.seq_length", length, minimum=1)
    if data_length != length:
        raise UserError(
            f"model.data.seq_length={data_length}: expected the same as model.encoder_seq_length={length}"
        )
    return length


def _max_positions(values: Values, seq_length: int) -> int:
    positions = values.integer("model.max_position_embeddings", seq_length, minimum=1)
    if positions < seq_length:
        raise UserError(
            f"model.max_position_embeddings={positions}: expected at least "
            f"model.encoder_seq_length={seq_length}"
        )
    return positions


def _query_groups(values: Values, heads: int) -> int:
    groups = values.integer("model.num_query_groups", heads, minimum=1)
    if heads % groups:
        values.fail("model.num_query_groups", f"a divisor of model.num_attention_heads={heads}")
    return groups


def _kv_channels(values: Values, hidden: int, heads: int) -> int:
    if values.is_set("model.kv_channels"):
        return values.integer("model.kv_channels", minimum=1)
    if hidden % heads:
        values.fail(
            "model.num_attention_heads", f"a divisor of model.hidden_size={hidden}, or model.kv_channels set"
        )
    return hidden // heads


def _activation(values: Values) -> str:
    # NeMo's 'fast-' names ask for a fused kernel of the same function.
    valid = ACTIVATIONS + tuple(f"fast-{name}" for name in ("gelu", "geglu", "reglu", "swiglu"))
    return values.choice("model.activation", valid, "gelu").removeprefix("fast-")


def _recompute(values: Values) -> Recompute | None:
    key = "model.activations_checkpoint_granularity"
    if not values.is_set(key):
        return None
    granularity = values.choice(key, ("full", "selective"))
    if granularity == "selective":
        return Recompute("selective", None, None)
    method = values.choice("model.activations_checkpoint_method", ("uniform", "block"))
    layers = values.integer("model.activations_checkpoint_num_layers", 1, minimum=1)
    return Recompute("full", "uniform" if method == "uniform" else "block", layers)
