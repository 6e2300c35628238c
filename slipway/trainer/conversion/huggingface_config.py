"""The model that a directory of Hugging Face's describes: its ``config.json`` becomes ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest
from slipway.trainer.checkpoint.description import MOST, MOST_LAYERS, Description
from slipway.trainer.checkpoint.files import read_mapping
from slipway.trainer.config.architecture import Architecture, Relative, Rope
from slipway.trainer.conversion.huggingface import CONFIG, FUNCTIONS, GATED, LLAMA3, TOKENS
from slipway.trainer.data.vocabulary import Vocabulary

_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def read_config(source: Path) -> dict[str, Any]:
    """Return the content of a directory's ``config.json``; raise UserError if it cannot be read."""
    return read_mapping(source / CONFIG)


def description_of(config: Mapping[str, Any], has_head: bool) -> Description:
    """Return the description of a model of Hugging Face's, with weights of 32 bits.

    Parameters
    ----------
    config
        The content of ``config.json``.
    has_head
        Whether the head's weights are beside the embedding's.

    Raises
    ------
    UserError
        If it is of another family, or our models lack one of its options.
    """
    readers = {"gpt2": _read_gpt2, "llama": _read_llama, "stablelm": _read_stablelm, "t5": _read_t5}
    family = str(config.get("model_type"))
    if family not in readers:
        raise UserError(
            f"{CONFIG}: model_type={family}: expected one of {', '.join(readers)}{suggest(family, readers)}"
        )
    options = _Options(config)
    encoder, decoder = readers[family](options, has_head)
    size, ends = options.whole("vocab_size"), options.tokens("eos_token_id")
    padding = options.token("pad_token_id")
    start = options.token("decoder_start_token_id" if encoder else "bos_token_id")
    if encoder and start is None:
        start = padding
    # The vocabulary of a test may be smaller than the ids of published special tokens.
    words = Vocabulary(size, ends[0] if ends else size - 1, CONFIG, start, padding)
    tokens = {key: config.get(key) for key in TOKENS if key in config}
    return Description(decoder, encoder, words, size, "fp32", imported={"tokens": tokens})


class _Options:
    """The options of ``config.json``, with the defaults of transformers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        if value is None and default is None:
            raise UserError(f"{CONFIG} lacks {key}")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a whole number."""
        value = self(key, default)
        if type(value) is not int or not least <= value <= most:
            raise UserError(f"{CONFIG}: {key}={value!r}: expected a whole number from {least} to {most:,}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number, finite and not below 0."""
        value = self(key, default)
        return _number(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{CONFIG}: {key}={value!r}: expected true or false")
        return value

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return the ids of tokens: of none, one or several."""
        value = self._config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number <= MOST for number in ids):
            raise UserError(f"{CONFIG}: {key}={value!r}: expected the id of a token")
        return tuple(ids)

    def token(self, key: str) -> int | None:
        """Return the id of a token, if there is one; the first Llamas' padding is -1, which is none."""
        if self._config.get(key) == -1:
            return None
        return next(iter(self.tokens(key)), None)

    def only(self, key: str, *valid: Any) -> None:
        """Refuse an option that our models lack; the first valid value is the default."""
        value = self(key, valid[0])
        if value not in valid:
            raise UserError(f"{CONFIG}: {key}={value}: our models have no such option; expected {valid[0]}")

    def function(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """Return our name of an activation."""
        value = str(self(key, default))
        known = {theirs: ours for ours, theirs in names.items()}
        name = known.get(_SYNONYMS.get(value, value))
        if name is None:
            valid = ", ".join([*known, *_SYNONYMS])
            raise UserError(f"{CONFIG}: {key}={value}: our models lack it; expected one of {valid}")
        return name

    def rope(self) -> tuple[int, float, Rope]:
        """Return the base, the share of the channels and the options of rotary positions."""
        scaling = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise UserError(f"{CONFIG}: rope_scaling={scaling!r}: expected a mapping")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        base = _number("rope_theta", scaling.get("rope_theta", self("rope_theta", 10000.0)))
        if base != int(base) or not base:
            raise UserError(f"{CONFIG}: rope_theta={base}: expected a whole number, as model.rotary_base")
        if kind not in ("default", "linear", "llama3"):
            raise UserError(f"{CONFIG}: rope_type={kind}: expected default, linear or llama3")
        for key, value in LLAMA3.items() if kind == "llama3" else ():
            if scaling.get(key) != value:
                raise UserError(
                    f"{CONFIG}: {key}={scaling.get(key)}: megatron-core scales with Llama 3.1's {value}"
                )
        factor = None if kind == "default" else _number("factor", scaling.get("factor"))
        share = scaling.get("partial_rotary_factor", self._config.get("partial_rotary_factor"))
        share = -1.0 if share is None else _number("partial_rotary_factor", share)
        rope = Rope(
            interleaved=False,
            interpolation=factor if kind == "linear" else None,
            scaling=factor if kind == "llama3" else None,
            fusion=False,
        )
        return int(base), share, rope


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"{CONFIG}: {key}={value!r}: expected a number that is finite and not below 0")
    return float(value)


_NO_ROPE = Rope(interleaved=False, interpolation=None, scaling=None, fusion=False)


def _architecture(**values: Any) -> Architecture:
    """Return an architecture; what a file of Hugging Face's does not say is a training's affair."""
    heads = values["num_attention_heads"]
    channels, groups = values["hidden_size"] / heads, heads / values.get("num_query_groups", heads)
    if not float(groups).is_integer() or ("kv_channels" not in values and not channels.is_integer()):
        raise UserError(f"{CONFIG}: {heads} attention heads do not fit hidden size and key/value heads")
    plain = {
        "num_query_groups": heads,
        "kv_channels": values["hidden_size"] // heads,
        "normalize_scores": True,
        "seq_length": values["max_positions"],
        "relative": None,
        "rotary_percentage": 1.0,
        "rotary_base": 10000,
        "rope": _NO_ROPE,
        "zero_centered_gamma": False,
        "head_bias": False,
        "vocab_divisor": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.02,
        "scaled_init": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "loss_fusion": False,
        "transformer_engine": False,
        "attention_backend": "auto",
        "recompute": None,
    }
    return Architecture(**{**plain, **values})


def _read_gpt2(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    option.only("scale_attn_by_inverse_layer_idx", False)
    option.only("add_cross_attention", False)
    hidden = option.whole("n_embd", 768)
    return None, _architecture(
        num_layers=option.whole("n_layer", 12, most=MOST_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=option.whole("n_inner", 4 * hidden),
        num_attention_heads=option.whole("n_head", 12),
        max_positions=option.whole("n_positions", 1024),
        position="learned_absolute",
        activation=option.function("activation_function", "gelu_new", FUNCTIONS),
        normalization="LayerNorm",
        norm_epsilon=option.number("layer_norm_epsilon", 1e-5),
        normalize_scores=option.flag("scale_attn_weights", True),
        bias=True,
        tied_embeddings=not has_head,
        hidden_dropout=option.number("resid_pdrop", 0.1),
        attention_dropout=option.number("attn_pdrop", 0.1),
    )


def _rotary(option: _Options, has_head: bool, **more: Any) -> Architecture:
    hidden, heads = option.whole("hidden_size"), option.whole("num_attention_heads")
    base, _, rope = option.rope()
    values = {
        "num_layers": option.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": option.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": option.whole("num_key_value_heads", heads),
        "kv_channels": option.whole("head_dim", hidden // heads),
        "max_positions": option.whole("max_position_embeddings", 2048),
        "position": "rope",
        "rotary_base": base,
        "rope": rope,
        "activation": option.function("hidden_act", "silu", GATED),
        "tied_embeddings": not has_head,
        "attention_dropout": option.number("attention_dropout", 0.0),
    }
    return _architecture(**{**values, **more})


def _read_llama(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    bias = option.flag("attention_bias", False)
    option.only("mlp_bias", bias)
    if option.rope()[1] not in (-1.0, 1.0):
        option.only("partial_rotary_factor", 1.0)
    norm = {"normalization": "RMSNorm", "norm_epsilon": option.number("rms_norm_eps", 1e-6)}
    return None, _rotary(option, has_head, bias=bias, **norm)


def _read_stablelm(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    for key in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual"):
        option.only(key, False)
    share = option.rope()[1]
    return None, _rotary(
        option,
        has_head,
        bias=False,
        normalization="LayerNorm",
        norm_epsilon=option.number("layer_norm_eps", 1e-5),
        rotary_percentage=0.25 if share < 0 else share,
        hidden_dropout=option.number("hidden_dropout", 0.0),
    )


def _read_t5(option: _Options, has_head: bool) -> tuple[Architecture | None, Architecture]:
    # The first T5 says that its head is tied, and means the factor before it too.
    scaled = option("scale_decoder_outputs", option("tie_word_embeddings", True))
    if bool(scaled) == has_head:
        raise UserError(
            f"{CONFIG}: scale_decoder_outputs={scaled} with "
            f"{'a head of its own' if has_head else 'a tied head'}: expected the first T5's, or T5 1.1's"
        )
    projection = str(option("feed_forward_proj", "relu"))
    kind, _, function = projection.rpartition("-")
    if kind not in ("", "gated"):
        raise UserError(f"{CONFIG}: feed_forward_proj={projection}: expected a function, or gated- and one")
    function = "gelu_new" if projection == "gated-gelu" else function
    names = GATED if kind else FUNCTIONS
    known = {theirs: ours for ours, theirs in names.items()}
    if function not in known:
        raise UserError(
            f"{CONFIG}: feed_forward_proj={projection}: our models lack it; expected "
            f"{' or '.join(f'gated-{name}' if kind else name for name in known)}"
        )
    dropout, layers = option.number("dropout_rate", 0.1), option.whole("num_layers", 6, most=MOST_LAYERS)
    buckets = option.whole("relative_attention_num_buckets", 32)
    values: dict[str, Any] = {
        "hidden_size": option.whole("d_model"),
        "ffn_hidden_size": option.whole("d_ff"),
        "num_attention_heads": option.whole("num_heads"),
        "kv_channels": option.whole("d_kv"),
        "max_positions": option.whole("n_positions", 512),
        "position": "relative",
        "relative": Relative(buckets, option.whole("relative_attention_max_distance", 128)),
        "normalize_scores": False,
        "activation": known[function],
        "normalization": "RMSNorm",
        "norm_epsilon": option.number("layer_norm_epsilon", 1e-6),
        "bias": False,
        "tied_embeddings": not has_head,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
    }
    decoder_layers = option.whole("num_decoder_layers", layers, most=MOST_LAYERS)
    return _architecture(num_layers=layers, **values), _architecture(num_layers=decoder_layers, **values)
