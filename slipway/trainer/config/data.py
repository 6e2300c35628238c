"""The source of a training's tokens, from NeMo's ``model.data.*`` keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from slipway.arithmetic.indexed import SPLIT_RULE
from slipway.trainer.config.rows import read_rows
from slipway.trainer.config.tokenizer import Tokenizer
from slipway.trainer.config.values import Values

_PREFIX = "model.data.data_prefix"
_ACCEPTED = "resume.accept_data"
_LATER = "resume.data_weights"
_FORMS = (
    "[prefix], [prefix, prefix, ...] or [weight, prefix, weight, prefix, ...], "
    "where a prefix names a .bin and an .idx file"
)


@dataclass(frozen=True)
class Blend:
    """Data sets and how much of each; without weights each counts as many windows as it has."""

    prefixes: tuple[Path, ...]
    weights: tuple[Fraction, ...] | None

    def __str__(self) -> str:
        if len(self.prefixes) == 1:
            return str(self.prefixes[0])
        if self.weights is None:
            return ", ".join(str(prefix) for prefix in self.prefixes)
        total = sum(self.weights)
        shares = zip(self.weights, self.prefixes, strict=True)
        return ", ".join(f"{float(100 * weight / total):.3g} % {prefix}" for weight, prefix in shares)


@dataclass(frozen=True)
class Data:
    """The source of a training's tokens.

    Attributes
    ----------
    kind
        ``mock`` makes its own, ``mmap`` reads indexed data sets.
    training, heldout
        The data sets of the two; None for mock data, and where no held-out data are named.
    splits
        Weights of the training, validation and test documents of each data set; None where data sets are
        named for each split, which are then taken whole.
    index_dir
        Where sample indices are kept between launches, or None.
    eod_mask_loss, reset_positions, reset_attention
        The effects of a document's end within a window.
    tokenizer
        What made the tokens.
    accepted
        The digest of the data that the user accepts in place of those that a checkpoint was trained on.
    split_rule
        How the documents are divided by `splits`: a training goes on as it began.
    """

    kind: Literal["mock", "mmap"]
    training: Blend | None
    heldout: Blend | None
    splits: tuple[float, float, float] | None
    index_dir: Path | None
    eod_mask_loss: bool
    reset_positions: bool
    reset_attention: bool
    tokenizer: Tokenizer
    accepted: str | None = None
    split_rule: str = SPLIT_RULE


def read_data(values: Values, t5: bool) -> Data:
    """Read the node; no file is opened.

    Parameters
    ----------
    t5
        Whether it is a T5's, to which the ends of documents mean nothing.

    Raises
    ------
    UserError
        If a value is invalid.
    """
    kind = values.choice("model.data.data_impl", ("mock", "mmap"), "mmap")
    blends = _blends(values, required=kind == "mmap")
    splits, index_dir = _splits(values), "model.data.index_mapping_dir"
    return Data(
        kind="mock" if kind == "mock" else "mmap",
        training=blends.get("train") if kind == "mmap" else None,
        heldout=blends.get("validation") if kind == "mmap" else None,
        splits=None if values.is_set(f"{_PREFIX}.train") else splits,
        index_dir=Path(values.text(index_dir)) if values.is_set(index_dir) else None,
        eod_mask_loss=not t5 and values.flag("model.data.eod_mask_loss", False),
        reset_positions=not t5 and values.flag("model.data.reset_position_ids", False),
        reset_attention=not t5 and values.flag("model.data.reset_attention_mask", False),
        tokenizer=read_rows(Tokenizer, values),
        accepted=values.text(_ACCEPTED) if values.is_set(_ACCEPTED) else None,
    )


def _blends(values: Values, required: bool) -> Mapping[str, Blend]:
    """Return the data sets of the splits, from one list for all or from NeMo's mapping of lists."""
    named = {split: f"{_PREFIX}.{split}" for split in ("train", "validation")}
    configured = {split: key for split, key in named.items() if values.is_set(key)}
    if not configured and not (required or values.raw(_PREFIX)):
        return {}
    if not configured:
        both = _blend(values, _PREFIX)
        return {"train": both, "validation": both}
    if "train" not in configured:
        values.fail(named["train"], _FORMS)
    return {split: _blend(values, key) for split, key in configured.items()}


def _blend(values: Values, key: str) -> Blend:
    raw = values.raw(key)
    items = [raw] if isinstance(raw, str) else raw
    if not isinstance(items, list) or not items:
        values.fail(key, _FORMS)
    numbers = [_number(item) for item in items]
    if all(number is None for number in numbers):
        return Blend(tuple(_path(values, key, item) for item in items), None)
    if len(items) % 2 or any((number is None) != bool(at % 2) for at, number in enumerate(numbers)):
        values.fail(key, f"weights and prefixes in pairs, or no weights: {_FORMS}")
    weights = [number for number in numbers[::2] if number is not None]
    # A data set that resume.data_weights adds has no samples before.
    positive = filter(None, weights) if values.raw(_LATER) and any(weights) else weights
    if not all(math.isfinite(weight) and weight > 0 for weight in positive):
        values.fail(key, "weights above 0; leave a data set that is not wanted out of the list")
    # As written, not as a binary float: 0.1 is a tenth.
    exact = tuple(Fraction(Decimal(str(item))) for item in items[::2])
    return Blend(tuple(_path(values, key, item) for item in items[1::2]), exact)


def _path(values: Values, key: str, item: Any) -> Path:
    if not isinstance(item, str) or not item.strip() or "\0" in item:
        values.fail(key, _FORMS)
    return Path(item.strip())


def _number(item: Any) -> float | None:
    """Return a weight; a prefix that looks like a number can be written with a directory."""
    if isinstance(item, bool) or not isinstance(item, (int, float, str)):
        return None
    try:
        return float(item)
    except (ValueError, OverflowError):
        return None


def _splits(values: Values) -> tuple[float, float, float]:
    key = "model.data.splits_string"
    expected = "up to three weights for training, validation and test, such as '90,10,0'"
    raw = values.raw(key)
    try:
        weights = [float(part) for part in str("900,50,50" if raw is None else raw).split(",")]
    except ValueError:
        values.fail(key, expected)
    weights = [*weights, 0.0, 0.0][:3] if len(weights) <= 3 else []
    if not weights or not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        values.fail(key, expected)
    return weights[0], weights[1], weights[2]
