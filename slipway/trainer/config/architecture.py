"""The shape of a stack of layers, a GPT or one of a T5's two, from NeMo's ``model.*`` keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from slipway.common.errors import UserError
from slipway.trainer.config.values import Values


@dataclass(frozen=True)
class Rope:
    """Options of rotary positions.

    Attributes
    ----------
    interleaved
        Whether a pair of channels is two neighbours, rather than one of each half.
    interpolation
        What positions are divided by (Chen et al. 2023, arXiv 2306.15595); None for 1.
    scaling
        What the lowest frequencies are divided by, as in Llama 3.1 for a context grown from 8,192 tokens, by
        megatron-core's formula, which is NeMo's; None for 1.
    fusion
        Whether Transformer Engine's kernel is asked for.
    """

    interleaved: bool
    interpolation: float | None
    scaling: float | None
    fusion: bool


def read_rope(values: Values) -> Rope:
    """Read NeMo's keys.

    Raises
    ------
    UserError
        If a value is invalid, or a factor is given and nothing is to be scaled with it.
    """
    scaled = values.flag("model.scale_positional_embedding", False)
    key = "model.seq_len_interpolation_factor"
    if values.is_set("model.scale_factor") and not scaled:
        raise UserError(
            f"model.scale_factor={values.raw('model.scale_factor')!r}: only valid with "
            "model.scale_positional_embedding=True"
        )
    return Rope(
        interleaved=values.flag("model.rotary_interleaved", False),
        interpolation=values.number(key, minimum=1.0) if values.is_set(key) else None,
        scaling=values.number("model.scale_factor", 8.0, minimum=1.0) if scaled else None,
        fusion=values.flag("model.apply_rope_fusion", False),
    )


ACTIVATIONS = ("gelu", "geglu", "reglu", "swiglu", "relu", "silu", "squared-relu")
NORMALIZATIONS = ("layernorm", "layernorm1p", "rmsnorm")
POSITIONS = ("learned_absolute", "rope", "none")

Position = Literal["learned_absolute", "rope", "relative", "none"]
AttentionBackend = Literal["auto", "transformer_engine", "sdpa", "local"]


@dataclass(frozen=True)
class Recompute:
    """The activations that are recomputed rather than kept, in megatron-core's words."""

    granularity: Literal["full", "selective"]
    method: Literal["uniform", "block"] | None
    num_layers: int | None


@dataclass(frozen=True)
class Relative:
    """T5's relative positions: buckets of distances, and the distance in tokens from which all share one.

    Raffel et al. 2019 (arXiv 1910.10683), section 2.1.
    """

    buckets: int
    max_distance: int


@dataclass(frozen=True)
class Architecture:
    """A stack of transformer layers with its embeddings; sizes count elements, `seq_length` tokens."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    normalize_scores: bool
    seq_length: int
    max_positions: int
    position: Position
    relative: Relative | None
    rotary_percentage: float
    rotary_base: int
    rope: Rope
    activation: str
    normalization: Literal["LayerNorm", "RMSNorm"]
    zero_centered_gamma: bool
    norm_epsilon: float
    bias: bool
    tied_embeddings: bool
    # Of a T5's tied head alone.
    head_bias: bool
    vocab_divisor: int
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    scaled_init: bool
    bias_activation_fusion: bool
    bias_dropout_fusion: bool
    loss_fusion: bool
    transformer_engine: bool
    attention_backend: AttentionBackend
    recompute: Recompute | None
    # Of queries, keys and values alone, which `bias` gives to all matrices; earlier markers lack it.
    qkv_bias: bool = False


def read_architecture(values: Values) -> Architecture:
    """Read and cross-check the sizes of a GPT.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    seq_length = _seq_length(values)
    return read_stack(
        values,
        "model",
        seq_length=seq_length,
        max_positions=max_positions(values, "model.encoder_seq_length", seq_length),
        positions=POSITIONS,
        tied=values.flag("model.share_embeddings_and_output_weights", True),
    )


def read_stack(
    values: Values, node: str, seq_length: int, max_positions: int, positions: Sequence[str], tied: bool
) -> Architecture:
    """Read and cross-check one stack of layers.

    Parameters
    ----------
    node
        Where the stack's own keys are: ``model`` for a GPT.
    seq_length, max_positions
        Tokens of a sequence, and how many learned positions there are.
    positions
        The valid kinds of positions.
    tied
        Whether the output's weights are the embedding's.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    hidden = values.integer(f"{node}.hidden_size", minimum=1)
    heads = values.integer(f"{node}.num_attention_heads", minimum=1)
    normalization = values.choice(f"{node}.normalization", NORMALIZATIONS, "layernorm")
    bias = values.flag(f"{node}.bias", True)
    one_plus = values.flag(f"{node}.layernorm_zero_centered_gamma", False) or normalization == "layernorm1p"
    if one_plus and normalization == "rmsnorm":
        raise UserError(
            f"{node}.layernorm_zero_centered_gamma=True: only valid with a layer norm, not with rmsnorm"
        )
    return Architecture(
        num_layers=values.integer(f"{node}.num_layers", minimum=1),
        hidden_size=hidden,
        ffn_hidden_size=values.integer(f"{node}.ffn_hidden_size", 4 * hidden, minimum=1),
        num_attention_heads=heads,
        num_query_groups=_query_groups(values, node, heads),
        kv_channels=_kv_channels(values, node, hidden, heads),
        # By sqrt(kv_channels); the paper's T5 leaves that to the initialization.
        normalize_scores=values.flag(f"{node}.normalize_attention_scores", True),
        seq_length=seq_length,
        max_positions=max_positions,
        position=cast(
            Position, values.choice(f"{node}.position_embedding_type", positions, "learned_absolute")
        ),
        relative=_relative(values, node) if "relative" in positions else None,
        rotary_percentage=values.number(f"{node}.rotary_percentage", 1.0, minimum=0.0),
        rotary_base=values.integer(f"{node}.rotary_base", 10000, minimum=1),
        rope=read_rope(values),
        activation=_activation(values, node),
        normalization="RMSNorm" if normalization == "rmsnorm" else "LayerNorm",
        zero_centered_gamma=one_plus,
        norm_epsilon=values.number(f"{node}.layernorm_epsilon", 1e-5, minimum=0.0),
        bias=bias,
        qkv_bias=values.flag(f"{node}.qkv_bias", False) and not bias,
        tied_embeddings=tied,
        head_bias="relative" in positions and tied and values.flag("model.tokens_head_bias", True),
        vocab_divisor=_vocab_divisor(values),
        hidden_dropout=values.number(f"{node}.hidden_dropout", 0.1, minimum=0.0, below=1.0),
        attention_dropout=values.number(f"{node}.attention_dropout", 0.1, minimum=0.0, below=1.0),
        init_std=values.number(f"{node}.init_method_std", 0.02, minimum=0.0),
        scaled_init=values.flag(f"{node}.use_scaled_init_method", True),
        bias_activation_fusion=values.flag(f"{node}.bias_activation_fusion", True),
        bias_dropout_fusion=values.flag(f"{node}.bias_dropout_add_fusion", True),
        loss_fusion=values.flag("model.cross_entropy_loss_fusion", False),
        transformer_engine=values.flag("model.transformer_engine", False),
        attention_backend=cast(
            AttentionBackend,
            values.choice("model.attention_backend", get_args(AttentionBackend), "auto"),
        ),
        recompute=_recompute(values, node),
    )


def _seq_length(values: Values) -> int:
    length = values.integer("model.encoder_seq_length", minimum=1)
    if values.integer("model.data.seq_length", length, minimum=1) != length:
        values.fail("model.data.seq_length", f"the same as model.encoder_seq_length={length}")
    return length


def max_positions(values: Values, key: str, length: int) -> int:
    """Return how many learned positions there are: at least the `length` of a sequence, which `key` has."""
    positions = values.integer("model.max_position_embeddings", length, minimum=1)
    if positions < length:
        values.fail("model.max_position_embeddings", f"at least {key}={length}")
    return positions


def _vocab_divisor(values: Values) -> int:
    divisor = values.integer("model.make_vocab_size_divisible_by", 128, minimum=1)
    # As in NeMo, a size that is given is the model's, without padding.
    return 1 if values.is_set("model.override_vocab_size") else divisor


def _relative(values: Values, node: str) -> Relative:
    buckets = values.integer(f"{node}.relative_attention_num_buckets", 32, minimum=4)
    distance = f"{node}.relative_attention_max_distance"
    return Relative(buckets, values.integer(distance, 128, minimum=buckets))


def _query_groups(values: Values, node: str, heads: int) -> int:
    groups = values.integer(f"{node}.num_query_groups", heads, minimum=1)
    if heads % groups:
        values.fail(f"{node}.num_query_groups", f"a divisor of {node}.num_attention_heads={heads}")
    return groups


def _kv_channels(values: Values, node: str, hidden: int, heads: int) -> int:
    if values.is_set(f"{node}.kv_channels"):
        return values.integer(f"{node}.kv_channels", minimum=1)
    if hidden % heads:
        values.fail(
            f"{node}.num_attention_heads",
            f"a divisor of {node}.hidden_size={hidden}, or {node}.kv_channels set",
        )
    return hidden // heads


def _activation(values: Values, node: str) -> str:
    # NeMo's 'fast-' names ask for a fused kernel of the same function.
    valid = ACTIVATIONS + tuple(f"fast-{name}" for name in ("gelu", "geglu", "reglu", "swiglu"))
    name = values.choice(f"{node}.activation", valid, "gelu").removeprefix("fast-")
    # The tanh form of GELU, as 'gelu' is here anyway. NeMo would put it in the place of any other function.
    if values.flag(f"{node}.openai_gelu", False) and name not in ("gelu", "geglu"):
        values.fail(f"{node}.openai_gelu", f"False, as {node}.activation={name} is not gelu or geglu")
    return name


def _recompute(values: Values, node: str) -> Recompute | None:
    key = f"{node}.activations_checkpoint_granularity"
    if not values.is_set(key):
        return None
    granularity = values.choice(key, ("full", "selective"))
    if granularity == "selective":
        return Recompute("selective", None, None)
    method = values.choice(f"{node}.activations_checkpoint_method", ("uniform", "block"))
    count = f"{node}.activations_checkpoint_num_layers"
    if method == "uniform":
        return Recompute("full", "uniform", values.integer(count, 1, minimum=1))
    # NeMo's stock T5 has 0: none of the layers.
    layers = values.integer(count, 1, minimum=0)
    return Recompute("full", "block", layers) if layers else None
