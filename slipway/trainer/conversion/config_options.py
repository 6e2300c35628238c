"""The options of ``config.json``: each is read into a field of `Architecture`, and written from it.

The forms of rotary scaling are those that version 4 of transformers writes, which later versions and other
programs read as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.description import MOST, MOST_LAYERS
from slipway.trainer.config.architecture import Rope

CONFIG = "config.json"
# Hugging Face's names of our functions (activations.py): its "gelu" is the exact one, and ours the tanh form.
FUNCTIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "squared-relu": "relu2"}
GATED = {"swiglu": "silu", "geglu": "gelu_new", "reglu": "relu"}
_SYNONYMS = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
# Llama 3.1's, which are fixed in megatron-core (rotary_pos_embedding.py).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

Values = Mapping[str, Any]


def whole(key: str, value: Any, most: int = MOST) -> int:
    """Check a whole number of at least 1."""
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(f"{CONFIG}: {key}={value!r}: expected a whole number from 1 to {most:,}")
    return value


def layers(key: str, value: Any) -> int:
    """Check a number of layers."""
    return whole(key, value, MOST_LAYERS)


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


def token_ids(config: Values, key: str) -> list[int]:
    """Return the ids of tokens: of none, one or several."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and 0 <= item <= MOST for item in ids):
        raise UserError(f"{CONFIG}: {key}={value!r}: expected the id of a token")
    return ids


class ConfigKey:
    """What a part of ``config.json`` means; `fields` are those of `Architecture`, by name."""

    def read(self, config: Values, fields: Values) -> dict[str, Any]:
        """Return fields of a configuration; `fields` are those that were read before."""
        raise NotImplementedError

    def write(self, fields: Values) -> dict[str, Any]:
        """Return the keys of a model."""
        raise NotImplementedError

    def mismatch(self, _fields: Values) -> tuple[str, str] | None:
        """Return a field for which no value of the keys expresses a model, and words for valid values."""
        return None


@dataclass(frozen=True)
class Option(ConfigKey):
    """A key with the value of a field.

    Attributes
    ----------
    key, field
        The key, and the field of `Architecture` with its value.
    check
        Checks a value, whose key it names in the message, and returns it.
    default
        That of transformers, or a function of the fields that were read before; None for a required key.
    """

    key: str
    field: str
    check: Callable[[str, Any], Any]
    default: Any = None

    def read(self, config: Values, fields: Values) -> dict[str, Any]:
        default = self.default(fields) if callable(self.default) else self.default
        value = default if config.get(self.key) is None else config[self.key]
        if value is None:
            raise UserError(f"{CONFIG} lacks {self.key}")
        return {self.field: self.check(self.key, value)}

    def write(self, fields: Values) -> dict[str, Any]:
        return {self.key: fields[self.field]}


@dataclass(frozen=True)
class Only(ConfigKey):
    """A key with a single value, or that of a field, as our models lack what another value means."""

    key: str
    value: Any = False
    field: str | None = None

    def read(self, config: Values, fields: Values) -> dict[str, Any]:
        """Refuse another value."""
        valid = fields[self.field] if self.field else self.value
        value = config.get(self.key)
        if value is not None and value != valid:
            raise UserError(f"{CONFIG}: {self.key}={value}: our models have no such option; expected {valid}")
        return {}

    def write(self, fields: Values) -> dict[str, Any]:
        return {self.key: fields[self.field] if self.field else self.value}


@dataclass(frozen=True)
class Imported(ConfigKey):
    """A field that all files of a family mean, without a key for it; a model of ours may have another."""

    field: str
    value: Any

    def read(self, _config: Values, _fields: Values) -> dict[str, Any]:
        return {self.field: self.value}

    def write(self, _fields: Values) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Activation(ConfigKey):
    """A key that names the function of the feed-forward blocks.

    `names` has Hugging Face's name of each of our functions; `shown` those that a mistake is answered with.
    """

    key: str
    names: Mapping[str, str]
    default: str
    shown: Mapping[str, str] | None = None

    def read(self, config: Values, _fields: Values) -> dict[str, Any]:
        shown = self.shown or self.names
        known = {theirs: ours for ours, theirs in shown.items()}
        value = str(config.get(self.key) or self.default)
        name = known.get(_SYNONYMS.get(value, value))
        if name is None:
            valid = ", ".join([*known, *(key for key, name in _SYNONYMS.items() if name in known)])
            raise UserError(f"{CONFIG}: {self.key}={value}: our models lack it; expected one of {valid}")
        return {"activation": name}

    def write(self, fields: Values) -> dict[str, Any]:
        return {self.key: self.names[fields["activation"]]}

    def mismatch(self, fields: Values) -> tuple[str, str] | None:
        """Return the functions that have a name, if a model's has none."""
        valid = " or ".join(self.shown or self.names)
        return None if fields["activation"] in self.names else ("activation", valid)


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
        values = {"rope_theta": 10000.0, "partial_rotary_factor": self.share}
        for key in values:
            found = (node[key] for node in (scaling, config) if node.get(key) is not None)
            values[key] = number(key, next(found, values[key]))
        base, share = values["rope_theta"], values["partial_rotary_factor"]
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
