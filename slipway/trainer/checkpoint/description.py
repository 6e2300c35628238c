"""The description of a checkpoint's model, so that its weights can be used without the run's configuration.

A part of the marker (:mod:`slipway.trainer.checkpoint.marker`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from slipway.common.errors import UserError
from slipway.trainer.config.architecture import (
    ROWS,
    Architecture,
    Recompute,
    Relative,
    Rope,
    read_architecture,
)
from slipway.trainer.config.rows import read_rows
from slipway.trainer.config.settings import Settings
from slipway.trainer.config.t5 import is_t5, read_denoising, read_stacks
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.config.values import Values
from slipway.trainer.data.identity import TOKENIZER, Identity
from slipway.trainer.data.vocabulary import Vocabulary, read_vocabulary

Precision = Literal["bf16", "fp32"]
# Bounds for the files of others: of layers, and of a matrix's sides.
MOST_LAYERS, MOST = 10_000, 1 << 24


@dataclass(frozen=True)
class Description:
    """A model, whole: what its weights are computed with, and the tokens that it knows.

    Attributes
    ----------
    decoder, encoder
        The stacks of layers; a GPT has no encoder.
    padded_vocabulary
        Rows of the embedding in the checkpoint.
    tokenizer
        Where the tokenizer was.
    checksums
        Those of the tokenizer's files, by path; none for mock data.
    imported
        What an imported model's files say of its family (``family``, their ``model_type``), of its special
        tokens (``tokens``, by their keys of ``config.json``) and of writing text (``generation``, the content
        of ``generation_config.json``).
    """

    decoder: Architecture
    encoder: Architecture | None
    vocabulary: Vocabulary
    padded_vocabulary: int
    precision: Precision
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    checksums: dict[str, str] = field(default_factory=dict)
    imported: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the description as a marker keeps it."""
        paths = {name: str(value) for name, value in vars(self.tokenizer).items() if isinstance(value, Path)}
        return {**asdict(self), "tokenizer": {**asdict(self.tokenizer), **paths}}


def describe(settings: Settings, vocabulary: Vocabulary, padded: int, data: Identity = ()) -> Description:
    """Return the description of a training's model.

    Parameters
    ----------
    vocabulary, padded
        Its tokens, and the rows of its embedding.
    data
        The identity of its files, from which the tokenizer's checksums are taken.
    """
    return Description(
        decoder=settings.architecture,
        encoder=settings.encoder,
        vocabulary=vocabulary,
        padded_vocabulary=padded,
        precision=settings.precision,
        tokenizer=settings.data.tokenizer,
        checksums={file.name: file.checksum for file in data if file.kind == TOKENIZER},
    )


def description_of_model(flat: Mapping[str, Any], padded: int, precision: Precision) -> Description:
    """Return the description of a model from the dotted keys of its configuration.

    For a checkpoint of a version that kept none.

    Parameters
    ----------
    flat
        ``model.*`` as the training had it.
    padded
        Rows of the embedding in the checkpoint.
    precision
        The type of the weights.

    Raises
    ------
    UserError
        If a value is invalid, or a file of the tokenizer is missing.
    """
    values, t5 = Values(flat), is_t5(flat)
    encoder, decoder = read_stacks(values) if t5 else (None, read_architecture(values))
    tokenizer = read_rows(Tokenizer, values)
    vocabulary = read_vocabulary(tokenizer, mock=values.raw("model.data.data_impl") == "mock")
    if t5:
        vocabulary = vocabulary.add_sentinels(read_denoising(values).sentinels)
    return Description(decoder, encoder, vocabulary, padded, precision, tokenizer)


def model_keys(shape: Architecture) -> dict[str, Any]:
    """Return NeMo's keys below ``model`` that make a GPT: `read_architecture` reads them.

    Keys of dropout, fusions and initialization are left out: weights of any of these fit.
    """
    left_out = {"relative", "head_bias", "rope", "zero_centered_gamma"}
    left_out |= set() if shape.position == "rope" else {"rotary_percentage", "rotary_base"}
    left_out |= set() if shape.qkv_bias else {"qkv_bias"}
    rows = {name: row for name, row in ROWS.items() if row.decides and name not in left_out}
    keys = {row.key.removeprefix("model."): getattr(shape, name) for name, row in rows.items()}
    keys["normalization"] = "layernorm1p" if shape.zero_centered_gamma else shape.normalization.lower()
    rope = shape.rope
    if shape.position == "rope":
        keys |= {"rotary_interleaved": True} if rope.interleaved else {}
        keys |= {"seq_len_interpolation_factor": rope.interpolation} if rope.interpolation else {}
        if rope.scaling is not None:
            keys |= {"scale_positional_embedding": True, "scale_factor": rope.scaling}
    return keys


def description_from_json(content: Mapping[str, Any], origin: str) -> Description:
    """Read the description that a marker keeps.

    Parameters
    ----------
    content
        What :meth:`Description.to_json` returned, perhaps in another version.
    origin
        Which checkpoint's, for the message.

    Raises
    ------
    UserError
        If it is malformed or incomplete.
    """
    try:
        encoder, tokenizer = content["encoder"], content["tokenizer"]
        paths = {name: Path(tokenizer[name]) for name in _PATHS if tokenizer[name] is not None}
        return Description(
            decoder=_architecture(content["decoder"]),
            encoder=None if encoder is None else _architecture(encoder),
            vocabulary=_record(Vocabulary, content["vocabulary"]),
            padded_vocabulary=int(content["padded_vocabulary"]),
            precision="bf16" if content["precision"] == "bf16" else "fp32",
            tokenizer=replace(_record(Tokenizer, tokenizer), **paths),
            checksums={str(name): str(value) for name, value in content["checksums"].items()},
            # An earlier version kept the tokens that end a document alone.
            imported=dict(content["imported"] if "imported" in content else {"ends": content.get("ends")}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{origin} does not describe its model ({error!r}): it is of another version"
        ) from None


_PATHS = ("model", "vocab_file", "merge_file")


def _architecture(content: Mapping[str, Any]) -> Architecture:
    relative, recompute = content["relative"], content["recompute"]
    shape: Architecture = _record(Architecture, content)
    return replace(
        shape,
        rope=_record(Rope, content["rope"]),
        relative=None if relative is None else _record(Relative, relative),
        recompute=None if recompute is None else _record(Recompute, recompute),
    )


def _record(kind: Any, content: Mapping[str, Any]) -> Any:
    # A later version may say more.
    values = {item.name: content[item.name] for item in fields(kind) if item.name in content}
    hints = get_type_hints(kind)
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        types = {int: is_number and isinstance(value, int), float: is_number, bool: isinstance(value, bool)}
        most = MOST_LAYERS if name == "num_layers" else MOST
        if not types.get(hints[name], True) or (is_number and not abs(value) <= most):
            raise ValueError(f"{name}={value!r}")
    return kind(**values)
