"""The shape of a stack of layers, a GPT or one of a T5's two, from NeMo's ``model.*`` keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, get_args

from slipway.common.errors import UserError
from slipway.trainer.config.rows import NUMBER, OFF, ON, SIZE, Reader, Row, read_rows, rows_of
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
        Divisor of the lowest frequencies, as in Llama 3.1 for a context grown from 8,192 tokens, by
        megatron-core's formula, which is NeMo's; None for 1.
    fusion
        Whether Transformer Engine's kernel is asked for.
    """

    interleaved: bool
    interpolation: float | None
    scaling: float | None
    fusion: bool


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


_DROPOUT: Reader = partial(Values.number, default=0.1, minimum=0.0, below=1.0)
_SCALING = ("model.seq_len_interpolation_factor", "model.scale_positional_embedding", "model.scale_factor")
_BACKEND: Reader = partial(Values.choice, valid=get_args(AttentionBackend), default="auto")


# --- readers of a key that look at its neighbours


def _name_sibling(key: str, name: str) -> str:
    """Return another key of the same node."""
    return f"{key.rpartition('.')[0]}.{name}"


def _heads(values: Values, key: str) -> int:
    return values.integer(_name_sibling(key, "num_attention_heads"), minimum=1)


def _ffn_hidden_size(values: Values, key: str) -> int:
    return values.integer(key, 4 * values.integer(_name_sibling(key, "hidden_size"), minimum=1), minimum=1)


def _query_groups(values: Values, key: str) -> int:
    heads = _heads(values, key)
    groups = values.integer(key, heads, minimum=1)
    if heads % groups:
        values.fail(key, f"a divisor of {_name_sibling(key, 'num_attention_heads')}={heads}")
    return groups


def _kv_channels(values: Values, key: str) -> int:
    if values.is_set(key):
        return values.integer(key, minimum=1)
    heads, hidden_key = _heads(values, key), _name_sibling(key, "hidden_size")
    hidden = values.integer(hidden_key, minimum=1)
    if hidden % heads:
        heads_key = _name_sibling(key, "num_attention_heads")
        values.fail(heads_key, f"a divisor of {hidden_key}={hidden}, or {key} set")
    return hidden // heads


def _qkv_bias(values: Values, key: str) -> bool:
    return values.flag(key, False) and not values.flag("model.bias", True)


def _activation(values: Values, key: str) -> str:
    # NeMo's 'fast-' names ask for a fused kernel of the same function.
    valid = ACTIVATIONS + tuple(f"fast-{name}" for name in ("gelu", "geglu", "reglu", "swiglu"))
    name = values.choice(key, valid, "gelu").removeprefix("fast-")
    # The tanh form of GELU, as 'gelu' is here anyway. NeMo would put it in the place of any other function.
    tanh = _name_sibling(key, "openai_gelu")
    if values.flag(tanh, False) and name not in ("gelu", "geglu"):
        values.fail(tanh, f"False, as {key}={name} is not gelu or geglu")
    return name


def _normalization(values: Values, key: str) -> str:
    return "RMSNorm" if values.choice(key, NORMALIZATIONS, "layernorm") == "rmsnorm" else "LayerNorm"


def _one_plus(values: Values, key: str) -> bool:
    name = values.choice(_name_sibling(key, "normalization"), NORMALIZATIONS, "layernorm")
    is_set = values.flag(key, False)
    if is_set and name == "rmsnorm":
        raise UserError(f"{key}=True: only valid with a layer norm, not with rmsnorm")
    return is_set or name == "layernorm1p"


def _rope(values: Values, interleaved: str) -> Rope:
    scaled = values.flag("model.scale_positional_embedding", False)
    key = "model.seq_len_interpolation_factor"
    if values.is_set("model.scale_factor") and not scaled:
        raise UserError(
            f"model.scale_factor={values.raw('model.scale_factor')!r}: only valid with "
            "model.scale_positional_embedding=True"
        )
    return Rope(
        interleaved=values.flag(interleaved, False),
        interpolation=values.number(key, minimum=1.0) if values.is_set(key) else None,
        scaling=values.number("model.scale_factor", 8.0, minimum=1.0) if scaled else None,
        fusion=values.flag("model.apply_rope_fusion", False),
    )


def _vocab_divisor(values: Values, key: str) -> int:
    divisor = values.integer(key, 128, minimum=1)
    # As in NeMo, a size that is given is the model's, without padding.
    return 1 if values.is_set("model.override_vocab_size") else divisor


def _recompute(values: Values, key: str) -> Recompute | None:
    if not values.is_set(key):
        return None
    granularity = values.choice(key, ("full", "selective"))
    if granularity == "selective":
        return Recompute("selective", None, None)
    method = values.choice(_name_sibling(key, "activations_checkpoint_method"), ("uniform", "block"))
    count = _name_sibling(key, "activations_checkpoint_num_layers")
    if method == "uniform":
        return Recompute("full", "uniform", values.integer(count, 1, minimum=1))
    # NeMo's stock T5 has 0: none of the layers.
    layers = values.integer(count, 1, minimum=0)
    return Recompute("full", "block", layers) if layers else None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A stack of transformer layers with its embeddings; sizes count elements, `seq_length` tokens."""

    num_layers: Annotated[int, Row("num_layers", SIZE, "shapes", "num_layers")]
    hidden_size: Annotated[int, Row("hidden_size", SIZE, "shapes", "hidden_size")]
    ffn_hidden_size: Annotated[int, Row("ffn_hidden_size", _ffn_hidden_size, "shapes", "ffn_hidden_size")]
    num_attention_heads: Annotated[int, Row("num_attention_heads", SIZE, "shapes", "num_attention_heads")]
    num_query_groups: Annotated[int, Row("num_query_groups", _query_groups, "shapes", "num_query_groups")]
    kv_channels: Annotated[int, Row("kv_channels", _kv_channels, "shapes", "kv_channels")]
    # By sqrt(kv_channels); the paper's T5 leaves that to the initialization.
    normalize_scores: Annotated[bool, Row("normalize_attention_scores", ON, "function")]
    seq_length: Annotated[int, Row("model.encoder_seq_length")]
    max_positions: Annotated[int, Row("model.max_position_embeddings", None, "shapes")]
    position: Annotated[Position, Row("position_embedding_type", None, "shapes")]
    relative: Annotated[Relative | None, Row("relative_attention_num_buckets", None, "shapes")]
    rotary_percentage: Annotated[float, Row("rotary_percentage", partial(NUMBER, default=1.0), "function")]
    rotary_base: Annotated[int, Row("rotary_base", partial(SIZE, default=10000), "function")]
    rope: Annotated[Rope, Row("model.rotary_interleaved", _rope, "function", also=_SCALING)]
    activation: Annotated[str, Row("activation", _activation, "shapes", also=("openai_gelu",))]
    normalization: Annotated[
        Literal["LayerNorm", "RMSNorm"], Row("normalization", _normalization, "shapes", "normalization")
    ]
    zero_centered_gamma: Annotated[
        bool, Row("layernorm_zero_centered_gamma", _one_plus, "shapes", "layernorm_zero_centered_gamma")
    ]
    norm_epsilon: Annotated[
        float, Row("layernorm_epsilon", partial(NUMBER, default=1e-5), "function", "layernorm_epsilon")
    ]
    bias: Annotated[bool, Row("bias", ON, "shapes", "add_bias_linear")]
    # Of queries, keys and values alone, which `bias` gives to all matrices; not in earlier markers.
    qkv_bias: Annotated[bool, Row("model.qkv_bias", _qkv_bias, "shapes", "add_qkv_bias")] = False
    tied_embeddings: Annotated[bool, Row("model.share_embeddings_and_output_weights", None, "shapes")]
    # Of a T5's tied head alone.
    head_bias: Annotated[bool, Row("model.tokens_head_bias", None, "shapes")]
    vocab_divisor: Annotated[
        int, Row("model.make_vocab_size_divisible_by", _vocab_divisor, also=("model.override_vocab_size",))
    ]
    hidden_dropout: Annotated[float, Row("hidden_dropout", _DROPOUT, megatron="hidden_dropout")]
    attention_dropout: Annotated[float, Row("attention_dropout", _DROPOUT, megatron="attention_dropout")]
    init_std: Annotated[
        float, Row("init_method_std", partial(NUMBER, default=0.02), megatron="init_method_std")
    ]
    scaled_init: Annotated[bool, Row("use_scaled_init_method", ON)]
    bias_activation_fusion: Annotated[
        bool, Row("bias_activation_fusion", ON, on_cpu="megatron-core's fused functions are slower on CPUs")
    ]
    bias_dropout_fusion: Annotated[bool, Row("bias_dropout_add_fusion", ON, megatron="bias_dropout_fusion")]
    transformer_engine: Annotated[
        bool,
        Row(
            "model.transformer_engine",
            OFF,
            on_cpu="Transformer Engine needs CUDA: megatron-core's local layers",
        ),
    ]
    # It has values of ours in addition to NeMo's auto and local.
    attention_backend: Annotated[AttentionBackend, Row("model.attention_backend", _BACKEND)]
    recompute: Annotated[
        Recompute | None,
        Row(
            "activations_checkpoint_granularity",
            _recompute,
            also=("activations_checkpoint_method", "activations_checkpoint_num_layers"),
        ),
    ]


ROWS = rows_of(Architecture)


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
    tied
        Whether the output's weights are the embedding's.

    Raises
    ------
    UserError
        If a value is invalid, or two values contradict each other.
    """
    is_t5 = "relative" in positions
    return read_rows(
        Architecture,
        values,
        node,
        seq_length=seq_length,
        max_positions=max_positions,
        position=values.choice(ROWS["position"].build_key(node), positions, "learned_absolute"),
        relative=_relative(values, node) if is_t5 else None,
        tied_embeddings=tied,
        head_bias=is_t5 and tied and values.flag("model.tokens_head_bias", True),
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


def _relative(values: Values, node: str) -> Relative:
    buckets = values.integer(f"{node}.relative_attention_num_buckets", 32, minimum=4)
    distance = f"{node}.relative_attention_max_distance"
    return Relative(buckets, values.integer(distance, 128, minimum=buckets))
