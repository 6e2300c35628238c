"""The first T5 and T5 1.1: an encoder and a decoder with relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture, Relative
from slipway.trainer.conversion import config_options
from slipway.trainer.conversion.config_options import CONFIG, ConfigKey, Option, Values, count, number
from slipway.trainer.conversion.families.family import KEYS, Family, Mismatch
from slipway.trainer.conversion.weight_map import SAME, Row, StackNames, plain_row, stack_rows, words_row

# Those that both stacks have alike.
_ALIKE = ("ffn_hidden_size", "num_attention_heads", "kv_channels", "activation", "norm_epsilon")
_DECODER_LAYERS = Option("num_decoder_layers", "num_layers", config_options.layers)
# T5Config takes "gated-gelu" as the tanh form.
_PROJECTIONS = {
    **config_options.FUNCTIONS,
    **{ours: f"gated-{theirs.replace('gelu_new', 'gelu')}" for ours, theirs in config_options.GATED.items()},
}


class _Positions(ConfigKey):
    """The buckets of relative positions."""

    _DEFAULTS = (("relative_attention_num_buckets", 32), ("relative_attention_max_distance", 128))

    def read(self, config: Values, _fields: Values) -> dict[str, Any]:
        return {"relative": Relative(*(count(key, config.get(key, plain)) for key, plain in self._DEFAULTS))}

    def write(self, fields: Values) -> dict[str, Any]:
        keys = (key for key, _ in self._DEFAULTS)
        return dict(zip(keys, vars(fields["relative"]).values(), strict=True))


def _names(shape: Architecture, stack: str) -> StackNames:
    """Return the names of a stack, ``encoder`` or ``decoder``."""
    own, cross, is_decoder = "layer.0.SelfAttention", "layer.1.EncDecAttention", stack == "decoder"
    dense = f"layer.{1 + is_decoder}"
    first = ("wi_0", "wi_1") if shape.activation.endswith("glu") else ("wi",)
    to_encoder = {
        "cross_attention.linear_q": (f"{cross}.q",),
        "cross_attention.linear_kv": (f"{cross}.k", f"{cross}.v"),
        "cross_attention.linear_proj": (f"{cross}.o",),
        "pre_cross_attn_layernorm.": ("layer.1.layer_norm",),
    }
    layer = {
        "self_attention.linear_qkv": (f"{own}.q", f"{own}.k", f"{own}.v"),
        "self_attention.linear_proj": (f"{own}.o",),
        "self_attention.linear_qkv.layer_norm_": ("layer.0.layer_norm",),
        **(to_encoder if is_decoder else {}),
        "mlp.linear_fc1": tuple(f"{dense}.DenseReluDense.{part}" for part in first),
        "mlp.linear_fc2": (f"{dense}.DenseReluDense.wo",),
        "mlp.linear_fc1.layer_norm_": (f"{dense}.layer_norm",),
    }
    return StackNames(f"{stack}.block", layer, f"{stack}.final_layer_norm")


def _stack(shape: Architecture, stack: str) -> Iterator[Row]:
    # Hugging Face has the relative positions in the first layer, for all.
    assert shape.relative is not None
    buckets = (shape.relative.buckets, shape.num_attention_heads)
    theirs = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield plain_row(f"{stack}_relative_pos_emb.relative_attention_bias.weight", buckets, theirs)
    yield from stack_rows(shape, stack, _names(shape, stack))


@dataclass(frozen=True)
class _T5(Family):
    """The family, whose decoder differs from its encoder in the number of layers alone."""

    def mismatches(self, decoder: Architecture, encoder: Architecture | None) -> Iterator[Mismatch]:
        assert encoder is not None
        yield from self.stack_mismatches("model.encoder", encoder)
        yield from self.stack_mismatches("model.decoder", decoder)
        for name in _ALIKE:
            first, second = getattr(encoder, name), getattr(decoder, name)
            if first != second:
                yield f"model.decoder.{KEYS.get(name, name)}", second, f"the encoder's {first}"

    def read(self, config: Values, has_head: bool) -> tuple[Architecture, Architecture | None]:
        # The first T5 says that its head is tied, and means the factor before it too.
        scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
        if bool(scaled) == has_head:
            raise UserError(
                f"{CONFIG}: scale_decoder_outputs={scaled} with "
                f"{'an untied head' if has_head else 'a tied head'}: expected the first T5's, or T5 1.1's"
            )
        encoder, _ = super().read(config, has_head)
        default = {_DECODER_LAYERS.key: encoder.num_layers}
        return replace(encoder, **_DECODER_LAYERS.read({**default, **config}, {})), encoder

    def write(self, decoder: Architecture, encoder: Architecture | None) -> dict[str, Any]:
        assert encoder is not None
        own = super().write(replace(decoder, num_layers=encoder.num_layers), None)
        return {**own, **_DECODER_LAYERS.write(vars(decoder)), "is_encoder_decoder": True}

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
        for row in _stack(shape, "decoder"):
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
    is_tied=True,
    is_encoder_decoder=True,
    fields={
        "position": "relative",
        "normalization": "RMSNorm",
        "bias": False,
        "normalize_scores": False,
        "num_query_groups": lambda fields: fields["num_attention_heads"],
    },
    options=(
        Option("d_model", "hidden_size", count),
        Option("d_kv", "kv_channels", count),
        Option("d_ff", "ffn_hidden_size", count),
        Option("num_layers", "num_layers", config_options.layers, 6),
        Option("num_heads", "num_attention_heads", count),
        Option("n_positions", "max_positions", count, 512),
        _Positions(),
        *(Option("dropout_rate", field, number, 0.1) for field in ("attention_dropout", "hidden_dropout")),
        Option("layer_norm_epsilon", "norm_epsilon", number, 1e-6),
        Option("feed_forward_proj", "activation", default="relu", names=_PROJECTIONS),
    ),
)
