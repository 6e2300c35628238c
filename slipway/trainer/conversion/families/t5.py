"""The first T5 and T5 1.1: an encoder and a decoder with relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture, Relative
from slipway.trainer.conversion.config_options import (
    CONFIG,
    FUNCTIONS,
    GATED,
    ConfigKey,
    Option,
    Values,
    layers,
    number,
    whole,
)
from slipway.trainer.conversion.families import family
from slipway.trainer.conversion.families.family import Family
from slipway.trainer.conversion.weight_map import (
    SAME,
    STACKED,
    Linear,
    Norm,
    Row,
    final_norm,
    grouped_qkv,
    headed_kv,
    layer_rows,
    plain_row,
    words_row,
)

# Those that both stacks have alike.
_ALIKE = ("ffn_hidden_size", "num_attention_heads", "kv_channels", "activation", "norm_epsilon")
_DECODER_LAYERS = "num_decoder_layers"


class _Positions(ConfigKey):
    """The buckets of relative positions."""

    _BUCKETS, _DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"

    def read(self, config: Values, _fields: Values) -> dict[str, Any]:
        keys = ((self._BUCKETS, 32), (self._DISTANCE, 128))
        numbers = (whole(key, default if config.get(key) is None else config[key]) for key, default in keys)
        return {"relative": Relative(*numbers)}

    def write(self, fields: Values) -> dict[str, Any]:
        return {self._BUCKETS: fields["relative"].buckets, self._DISTANCE: fields["relative"].max_distance}


# T5Config takes "gated-gelu" as the tanh form.
_PROJECTIONS = {
    **FUNCTIONS,
    **{ours: f"gated-{theirs.replace('gelu_new', 'gelu')}" for ours, theirs in GATED.items()},
}


class _Projection(ConfigKey):
    """The function of the feed-forward blocks, ``gated-`` or not."""

    _KEY = "feed_forward_proj"

    def read(self, config: Values, _fields: Values) -> dict[str, Any]:
        known = {theirs: ours for ours, theirs in _PROJECTIONS.items()} | {"gated-gelu_new": "geglu"}
        value = str(config.get(self._KEY) or "relu")
        if value not in known:
            valid = " or ".join(known)
            raise UserError(f"{CONFIG}: {self._KEY}={value}: our models lack it; expected {valid}")
        return {"activation": known[value]}

    def write(self, fields: Values) -> dict[str, Any]:
        return {self._KEY: _PROJECTIONS[fields["activation"]]}

    def mismatch(self, fields: Values) -> tuple[str, str] | None:
        return None if fields["activation"] in _PROJECTIONS else ("activation", " or ".join(_PROJECTIONS))


def _stack(shape: Architecture, name: str) -> Iterator[Row]:
    """Yield the rows of a stack, ``encoder`` or ``decoder``."""
    own, cross, is_decoder = "layer.0.SelfAttention", "layer.1.EncDecAttention", name == "decoder"
    dense = f"layer.{1 + is_decoder}"
    first = ("wi_0", "wi_1") if shape.activation in GATED else ("wi",)
    # Hugging Face has the relative positions in the first layer, for all.
    assert shape.relative is not None
    buckets = (shape.relative.buckets, shape.num_attention_heads)
    their = f"{name}.block.0.{own}.relative_attention_bias.weight"
    yield plain_row(f"{name}_relative_pos_emb.relative_attention_bias.weight", buckets, their)
    attentions: tuple[Linear | Norm, ...] = (
        Linear("self_attention.linear_qkv", tuple(f"{own}.{part}" for part in "qkv"), grouped_qkv(shape)),
        Linear("self_attention.linear_proj", (f"{own}.o",)),
        Norm("self_attention.linear_qkv.layer_norm_", "layer.0.layer_norm"),
    )
    if is_decoder:
        attentions += (
            Linear("cross_attention.linear_q", (f"{cross}.q",)),
            Linear("cross_attention.linear_kv", (f"{cross}.k", f"{cross}.v"), headed_kv(shape)),
            Linear("cross_attention.linear_proj", (f"{cross}.o",)),
            Norm("pre_cross_attn_layernorm.", "layer.1.layer_norm"),
        )
    parts = (
        *attentions,
        Linear(
            "mlp.linear_fc1",
            tuple(f"{dense}.DenseReluDense.{part}" for part in first),
            STACKED if len(first) > 1 else SAME,
        ),
        Linear("mlp.linear_fc2", (f"{dense}.DenseReluDense.wo",)),
        Norm("mlp.linear_fc1.layer_norm_", f"{dense}.layer_norm"),
    )
    yield from layer_rows(shape, name, f"{name}.block", parts)
    yield from final_norm(shape, name, f"{name}.final_layer_norm")


@dataclass(frozen=True)
class _T5(Family):
    is_encoder_decoder: bool = field(default=True, init=False)

    def mismatches(self, decoder: Architecture, encoder: Architecture | None) -> Iterator[family.Mismatch]:
        assert encoder is not None
        yield from self.stack_mismatches("model.encoder", encoder)
        yield from self.stack_mismatches("model.decoder", decoder)
        for name in _ALIKE:
            first, second = getattr(encoder, name), getattr(decoder, name)
            if first != second:
                yield f"model.decoder.{family.KEYS.get(name, name)}", second, f"the encoder's {first}"

    def read(self, config: Values, has_head: bool) -> tuple[Architecture, Architecture | None]:
        # The first T5 says that its head is tied, and means the factor before it too.
        scaled = config.get("scale_decoder_outputs")
        if scaled is None:
            scaled = config.get("tie_word_embeddings") in (None, True)
        if bool(scaled) == has_head:
            raise UserError(
                f"{CONFIG}: scale_decoder_outputs={scaled} with "
                f"{'a head of its own' if has_head else 'a tied head'}: expected the first T5's, or T5 1.1's"
            )
        encoder, _ = super().read(config, has_head)
        count = config.get(_DECODER_LAYERS)
        decoder_layers = encoder.num_layers if count is None else layers(_DECODER_LAYERS, count)
        return replace(encoder, num_layers=decoder_layers), encoder

    def write(self, decoder: Architecture, encoder: Architecture | None) -> dict[str, Any]:
        assert encoder is not None
        own = super().write(replace(decoder, num_layers=encoder.num_layers), None)
        return {**own, _DECODER_LAYERS: decoder.num_layers, "is_encoder_decoder": True}

    def rows(self, description: Description) -> Iterator[Row]:
        """Yield the rows of both stacks and the head.

        The first T5 has a tied head and a factor before it. megatron-core's tied head has no factor, and a
        bias unless ``model.tokens_head_bias=False``.
        """
        import torch

        shape, encoder, size = description.decoder, description.encoder, description.vocabulary.size
        assert encoder is not None
        yield words_row(size, shape, "embedding.word_embeddings.weight", self.words)
        yield from _stack(encoder, "encoder")
        tied, norm = shape.tied_embeddings, "decoder.final_layernorm.weight"
        for row in self.layers(shape):
            yield replace(row, scale=shape.hidden_size**-0.5) if tied and row.ours == norm else row
        if shape.head_bias:
            name, copies = "lm_head.output_layer.bias", ("output_layer.bias",)
            zeros = partial(torch.zeros, (size,))
            yield Row(name, (size,), (), zeros, SAME[1], is_padded=True, copies=copies)
        if not tied:
            head = words_row(size, shape, "lm_head.output_layer.weight", "lm_head.weight")
            yield replace(head, copies=("output_layer.weight",))


T5 = _T5(
    name="t5",
    model_class="T5ForConditionalGeneration",
    words="shared.weight",
    fields={
        "position": "relative",
        "normalization": "RMSNorm",
        "bias": False,
        "normalize_scores": False,
        "num_query_groups": lambda fields: fields["num_attention_heads"],
    },
    options=(
        Option("d_model", "hidden_size", whole),
        Option("d_kv", "kv_channels", whole),
        Option("d_ff", "ffn_hidden_size", whole),
        Option("num_layers", "num_layers", layers, 6),
        Option("num_heads", "num_attention_heads", whole),
        Option("n_positions", "max_positions", whole, 512),
        _Positions(),
        *(Option("dropout_rate", name, number, 0.1) for name in ("attention_dropout", "hidden_dropout")),
        Option("layer_norm_epsilon", "norm_epsilon", number, 1e-6),
        _Projection(),
    ),
    layers=partial(_stack, name="decoder"),
    is_tied=True,
)
