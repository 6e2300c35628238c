"""The options of ``config.json``: each is read into a field of `Architecture`, and written from it.

The forms of rotary scaling are those that version 4 of transformers writes, which later versions and other
programs read as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import MOST, MOST_LAYERS
from slipway.trainer.config.architecture import Rope

CONFIG = "config.json"
# Hugging Face's names of our functions (activations.py): its "gelu" is the exact one, and ours the tanh form.
FUNCTIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "squared-relu": "relu2"}
GATED = {"swiglu": "silu", "geglu": "gelu_new", "reglu": "relu"}
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu", "gated-gelu_new": "gated-gelu"}
# Llama 3.1's, which are fixed in megatron-core (rotary_pos_embedding.py).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

Values = Mapping[str, Any]


def count(key: str, value: Any, most: int = MOST) -> int:
    """Check a whole number of at least 1."""
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"{CONFIG}: {key}={value!r}: expected a whole number from 1 to {most:,}")
    return value


def layers(key: str, value: Any) -> int:
    """Check a number of layers."""
    return count(key, value, MOST_LAYERS)


def number(key: str, value: Any) -> float:
    """Check a number that is finite and not below 0."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UserError(f"{CONFIG}: {key}={value!r}: expected a number that is finite and not below 0")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{CONFIG}: {key}={value!r}: expected true or false")
    return value


def read_token_ids(config: Values, key: str) -> list[int]:
    """Return the ids of any number of tokens."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and 0 <= item <= MOST for item in ids):
        raise UserError(f"{CONFIG}: {key}={value!r}: expected the id of a token")
    return ids


class ConfigKey(ABC):
    """A part of ``config.json``; `fields` are those of `Architecture`, by name."""

    @abstractmethod
    def read(self, config: Values, fields: Values) -> dict[str, Any]:
        """Return fields of a configuration, which has no nulls; `fields` are those that were read before."""

    @abstractmethod
    def write(self, fields: Values) -> dict[str, Any]:
        """Return the keys of a model."""

    def mismatch(self, _fields: Values) -> tuple[str, str] | None:
        """Return a field for which no value of the keys expresses a model, and words for valid values."""
        return None


@dataclass(frozen=True)
class Option(ConfigKey):
    """A key with the value of a field.

    Attributes
    ----------
    key, field
        The key, and the field with its value; None where our models have the default value only.
    check
        Checks a value, whose key it names in the message, and returns it.
    default
        That of transformers, or a function of the fields that were read before; None for a required key, or
        where null is the only value that our models have.
    names
        Their names of our values.
    unread
        A value of ours that is written, and never read.
    missing
        Transformers' value where a file lacks the key, if null means another one.
    """

    key: str
    field: str | None = None
    check: Callable[[str, Any], Any] = lambda _, value: value
    default: Any = None
    names: Mapping[str, str] | None = None
    unread: str | None = None
    missing: Any = None

    def read(self, config: Values, fields: Values) -> dict[str, Any]:
        default = self._default(fields)
        value = config.get(self.key, default)
        if self.field is None:
            if value != default:
                expected = "null" if default is None else default
                note = " (also where the file lacks the key)" if value == self.missing else ""
                raise UserError(
                    f"{CONFIG}: {self.key}={value}{note}: our models have no such option; expected {expected}"
                )
            return {}
        if value is None:
            raise UserError(f"{CONFIG} lacks {self.key}")
        if self.names is not None:
            value = self._translate_name(str(value), self.names)
        return {self.field: self.check(self.key, value)}

    def write(self, fields: Values) -> dict[str, Any]:
        value = self._default(fields) if self.field is None else fields[self.field]
        return {self.key: value if self.names is None else self.names[value]}

    def mismatch(self, fields: Values) -> tuple[str, str] | None:
        if self.field is None or self.names is None or fields[self.field] in self.names:
            return None
        return self.field, " or ".join(name for name in self.names if name != self.unread)

    def _default(self, fields: Values) -> Any:
        return self.default(fields) if callable(self.default) else self.default

    def _translate_name(self, value: str, names: Mapping[str, str]) -> str:
        known = {theirs: ours for ours, theirs in names.items() if ours != self.unread}
        name = known.get(_SYNONYMS.get(value, value))
        if name is None:
            valid = ", ".join([*known, *(word for word, name in _SYNONYMS.items() if name in known)])
            raise UserError(f"{CONFIG}: {self.key}={value}: our models lack it; expected one of {valid}")
        return name


def stated(config: Values, keys: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return a configuration without nulls, and with the values that transformers gives to missing keys."""
    missing = {key.key: key.missing for key in keys if isinstance(key, Option)}
    return {key: value for key, value in {**missing, **config}.items() if value is not None}


@dataclass(frozen=True)
class Rotary(ConfigKey):
    """The options of rotary positions; `share` of the channels are turned where a file says nothing.

    `is_partial` says whether a file may have another share.
    """

    share: float = 1.0
    is_partial: bool = False

    def read(self, config: Values, _fields: Values) -> dict[str, Any]:
        """Return the base, the share of the channels and the scaling."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise UserError(f"{CONFIG}: rope_scaling={scaling!r}: expected a mapping")
        stated = {**config, **{key: value for key, value in scaling.items() if value is not None}}
        base = number("rope_theta", stated.get("rope_theta", 10000.0))
        share = number("partial_rotary_factor", stated.get("partial_rotary_factor", self.share))
        if base != int(base) or not base:
            raise UserError(f"{CONFIG}: rope_theta={base}: expected a whole number, as model.rotary_base")
        if share != self.share and not self.is_partial:
            raise UserError(f"{CONFIG}: partial_rotary_factor={share}: expected {self.share}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UserError(f"{CONFIG}: rope_type={kind}: expected default, linear or llama3")
        for key, value in _LLAMA3.items() if kind == "llama3" else ():
            if scaling.get(key) != value:
                raise UserError(
                    f"{CONFIG}: {key}={scaling.get(key)}: megatron-core scales with Llama 3.1's {value}"
                )
        factor = None if kind == "default" else number("factor", scaling.get("factor"))
        rope = Rope(
            interleaved=False,
            interpolation=factor if kind == "linear" else None,
            scaling=factor if kind == "llama3" else None,
            fusion=False,
        )
        return {"rotary_base": int(base), "rotary_percentage": share, "rope": rope}

    def write(self, fields: Values) -> dict[str, Any]:
        rope, scaling = fields["rope"], None
        if rope.scaling is not None:
            scaling = {"rope_type": "llama3", "factor": rope.scaling, **_LLAMA3}
        elif rope.interpolation not in (None, 1.0):
            scaling = {"rope_type": "linear", "factor": rope.interpolation}
        share = {"partial_rotary_factor": fields["rotary_percentage"]} if self.is_partial else {}
        return {"rope_theta": float(fields["rotary_base"]), "rope_scaling": scaling, **share}

    def mismatch(self, fields: Values) -> tuple[str, str] | None:
        """Return what Hugging Face's scaling and turning of channels do not combine."""
        rope, share = fields["rope"], fields["rotary_percentage"]
        if share != 1.0 and (not self.is_partial or rope.interleaved):
            return "rotary_percentage", "1.0"
        if rope.scaling is not None and rope.interpolation not in (None, 1.0):
            return "rope", "None or 1.0"
        return None
