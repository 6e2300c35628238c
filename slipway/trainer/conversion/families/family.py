"""A family of Hugging Face's models: its options, both ways, and its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import Description
from slipway.trainer.config.architecture import Architecture, Rope
from slipway.trainer.conversion.config_options import CONFIG, ConfigKey
from slipway.trainer.conversion.weight_map import Row, StackNames, plain_row, stack_rows, words_row

Fields = Mapping[str, Any]
# A key of the training, its value, and words for those that a family has.
Mismatch = tuple[str, Any, str]

# Our keys of fields that have another name.
KEYS = {
    "position": "position_embedding_type",
    "normalize_scores": "normalize_attention_scores",
    "norm_epsilon": "layernorm_epsilon",
    "rope": "seq_len_interpolation_factor",
}

_WORDS = {"LayerNorm": "layernorm or layernorm1p", "RMSNorm": "rmsnorm"}


@dataclass(frozen=True)
class Family:
    """A family of models with one stack of layers; T5's class derives from it.

    Attributes
    ----------
    name, model_class
        The ``model_type`` of ``config.json``, and the class of transformers with a head.
    words, positions
        The names of the embeddings of tokens and positions.
    names
        Those of the layers' weights.
    fields
        Fields of `Architecture` that all of its models have alike; a function computes one of the others.
    is_tied
        Whether the head is the embedding where ``config.json`` says nothing.
    is_encoder_decoder
        Whether its models have an encoder.
    """

    name: str
    model_class: str
    words: str
    fields: Fields
    options: tuple[ConfigKey, ...]
    names: StackNames | None = None
    positions: str | None = None
    is_tied: bool = False
    is_encoder_decoder: bool = False

    def mismatches(self, decoder: Architecture, encoder: Architecture | None) -> Iterator[Mismatch]:
        """Yield the keys for which no model of the family computes what these stacks do."""
        yield from self.stack_mismatches("model", decoder)

    def stack_mismatches(self, node: str, shape: Architecture) -> Iterator[Mismatch]:
        """Yield the keys of one stack."""
        values = vars(shape)
        for name, fixed in self.fields.items():
            valid = fixed(values) if callable(fixed) else fixed
            if values[name] != valid:
                words = f"{valid:g}" if isinstance(valid, float) else _WORDS.get(valid, str(valid))
                yield f"{node}.{KEYS.get(name, name)}", values[name], words
        for option in self.options:
            if found := option.mismatch(values):
                name, words = found
                yield f"{node}.{KEYS.get(name, name)}", values[name], words

    def read(self, config: Fields, has_head: bool) -> tuple[Architecture, Architecture | None]:
        """Return the decoder of a configuration, and its encoder if it has one.

        Raises
        ------
        UserError
            If it has an option that our models do not.
        """
        fields = {name: value for name, value in self.fields.items() if not callable(value)}
        for option in self.options:
            fields |= option.read(config, fields)
        return _architecture(tied_embeddings=not has_head, **fields), None

    def write(self, decoder: Architecture, encoder: Architecture | None) -> dict[str, Any]:
        """Return the family's own keys of ``config.json``."""
        return {key: value for option in self.options for key, value in option.write(vars(decoder)).items()}

    def rows(self, description: Description) -> Iterator[Row]:
        """Yield the rows of the weight map, in the order in which Hugging Face's weights are written."""
        shape, size = description.decoder, description.vocabulary.size
        yield words_row(size, shape, "embedding.word_embeddings.weight", self.words)
        if self.positions is not None:
            extent = (shape.max_positions, shape.hidden_size)
            yield plain_row("embedding.position_embeddings.weight", extent, self.positions)
        assert self.names is not None
        yield from stack_rows(shape, "decoder", self.names)
        if not shape.tied_embeddings:
            yield words_row(size, shape, "output_layer.weight", "lm_head.weight")


def hidden_by_heads(fields: Fields) -> float:
    """Return the channels of a head where a family has no key for them."""
    return float(fields["hidden_size"] / fields["num_attention_heads"])


_NO_ROPE = Rope(interleaved=False, interpolation=None, scaling=None, fusion=False)


def _architecture(**fields: Any) -> Architecture:
    """Return an architecture; fields that Hugging Face's files do not have concern trainings alone."""
    heads = fields["num_attention_heads"]
    groups = heads / fields.get("num_query_groups", heads)
    if not float(groups).is_integer() or ("kv_channels" not in fields and fields["hidden_size"] % heads):
        raise UserError(f"{CONFIG}: {heads} attention heads do not fit hidden size and key/value heads")
    plain = {
        "num_query_groups": heads,
        "kv_channels": fields["hidden_size"] // heads,
        "bias": True,
        "normalize_scores": True,
        "seq_length": fields["max_positions"],
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
        "transformer_engine": False,
        "attention_backend": "auto",
        "recompute": None,
    }
    return Architecture(**{**plain, **fields})
