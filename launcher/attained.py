"""Constants of the speed model: the shares of the peaks of GPUs and links that trainings attain.

`attained.json` has them with their sources; a site changes some of them with `estimates.attained`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_TABLE = Path(__file__).resolve().with_name("attained.json")
# Keys of the file that are no constants.
_TEXTS = frozenset({"about", "fitted", "sources", "assumed"})
# Tables that a site may add rows to.
_OPEN = frozenset({"gpus", "like"})
_ROWS = ("half", "fp8", "attention")
# Bounds of a number, by the beginning of its key: from, to, whether `from` itself is valid, and its meaning.
_BOUNDS: tuple[tuple[str, float, float, bool, str], ...] = (
    ("gpus.", 0, 1, False, "a part of the peak"),
    ("memory", 0, 1, False, "a part of the bandwidth"),
    ("links", 0, 1, False, "a part of the bandwidth"),
    ("exposed.", 0, 1, True, "a part"),
    ("tile.", 0, 4096, True, "rows or columns"),
    ("casts", 0, 1000, True, "bytes"),
    ("rings", 0, 1000, True, "bytes"),
    ("launch", 0, 1, True, "seconds"),
    ("step", 0, 600, True, "seconds"),
    ("straggling", 0, 1, True, "a part of the step"),
    ("engines.", 0.1, 100, True, "a factor"),
    ("families.", 0.1, 100, True, "a factor"),
    ("megatron.compiled", 0.1, 100, True, "a factor"),
    ("megatron.", 0, 1, True, "seconds"),
)
# GPUs that are not in the table count as those of the same compute capability.
_BY_CAPABILITY = {7: "v100", 8: "a100", 9: "h100", 10: "b200", 12: "b200"}


class InvalidEntry(ValueError):
    """An invalid entry of a mapping of the configuration; `key` is the one below the mapping's."""

    def __init__(self, key: str, problem: str, *value: Any) -> None:
        super().__init__(f"{key}{''.join(f'={part}' for part in value)}: {problem}")
        self.key, self.problem, self.value = key, problem, value


class Products(NamedTuple):
    """Shares of a GPU's dense peak that large matrix products and the core of attention attain.

    `half` is for 16-bit operands; `fp8` is None where a GPU has no FP8; `attention` is for the core's forward
    pass, in 16 bits, by a fused kernel. `measured` is the GPU of the published trainings; `is_alike` is True
    if it is this one, or one with its chip.
    """

    half: float
    fp8: float | None
    attention: float
    measured: str
    is_alike: bool


class Attained(NamedTuple):
    """The constants of the speed model."""

    gpus: Mapping[str, Mapping[str, float]]
    like: Mapping[str, str]
    # Shares of the bandwidth of the memory, and of NVLink and the network.
    memory: float
    links: float
    # Rows or columns added to each side of a matrix product, for tiles, prologue and epilogue.
    tile_half: float
    tile_fp8: float
    casts: float  # bytes that FP8 reads and writes in addition for each operand of a product
    rings: float  # bytes of context parallel for a value of the output and each other rank
    # Shares of the communication that computing does not hide where the two overlap.
    exposed_tensor: float
    exposed_pipeline: float
    exposed_data: float
    launch: float  # least seconds of a layer's forward pass
    step: float  # seconds of each step for the norm of the gradients, data and logging
    straggling: float  # the share by which a step is longer with each doubling of the nodes
    # Factors to the seconds of a step of NeMo's GPT.
    engines: Mapping[str, float]
    families: Mapping[str, float]
    # Of our trainer: `step`, `launch` of layers in separate kernels, the factor of `compiled` layers.
    megatron: Mapping[str, float]

    def products(self, generation: str, capability: tuple[int, int] | None) -> Products:
        """Return the shares that a GPU attains, or the GPU that is most like it."""
        alike = self.like.get(generation, generation)
        name = alike if alike in self.gpus else _BY_CAPABILITY.get(capability[0] if capability else 0, "a100")
        row = self.gpus[name]
        return Products(row["half"], row.get("fp8"), row["attention"], name, alike in self.gpus)


def attained(changes: Mapping[str, Any] | None = None) -> Attained:
    """Return the shipped constants, with a site's changes; raise `InvalidEntry` if one is not valid."""
    table = {key: value for key, value in _table().items() if key not in _TEXTS}
    table = _merged(table, changes or {}, "")
    for name, alike in table["like"].items():
        if not isinstance(alike, str) or alike not in table["gpus"]:
            raise InvalidEntry(f"like.{name}", f"expected one of {', '.join(table['gpus'])}", alike)
    for key in ("tile", "exposed"):
        table |= {f"{key}_{part}": value for part, value in table.pop(key).items()}
    return Attained(**table)


def assumed(engine: str, measured: str, *, is_fp8: bool) -> tuple[str | None, list[str]]:
    """Return the GPU of published trainings for the row of an estimate, if any, and the assumptions."""
    table, assumptions = _table()["assumed"], []
    whose: str | None = measured
    if measured not in _table()["gpus"]:
        whose = None  # a site's row
    elif measured in table["gpus"] and not is_fp8:
        whose = table["gpus"][measured]
        assumptions.append(f"no published trainings on {measured}{' in bf16' if whose else ''}")
    known = table["engines"].get(engine)
    if known == []:
        assumptions.append("no measurement of our trainer")
    elif known is not None and measured not in known:
        assumptions.append(f"Megatron-LM is measured on {', '.join(known)} alone")
    return whose, assumptions


@cache
def _table() -> Mapping[str, Any]:
    return MappingProxyType(json.loads(_TABLE.read_text(encoding="utf-8")))


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any], parent: str) -> dict[str, Any]:
    """Return a table with changes to it; `parent` is its own key, for messages."""
    merged = dict(table)
    for name, value in changes.items():
        key = f"{parent}{name}"
        if name not in table and parent.rstrip(".") not in _OPEN:
            close = get_close_matches(str(name), table, n=1)
            hint = f"did you mean {close[0]}?" if close else f"valid: {', '.join(table)}"
            raise InvalidEntry(key, f"no such key; {hint}")
        merged[str(name)] = _changed(key, table.get(name), value)
    return merged


def _changed(key: str, before: Any, value: Any) -> Any:
    if key.startswith("like."):
        return value  # checked when all GPUs are known
    if isinstance(before, Mapping) or (key.startswith("gpus.") and key.count(".") == 1):
        if not isinstance(value, Mapping):
            raise InvalidEntry(key, "expected a mapping", value)
        if not key.startswith("gpus."):
            return _merged(before, value, f"{key}.")
        row = _merged(before or dict.fromkeys(_ROWS), value, f"{key}.")
        row = {name: part for name, part in row.items() if part is not None}
        missing = {"half", "attention"} - set(row)
        if missing:
            raise InvalidEntry(key, f"needed too: {', '.join(sorted(missing))}")
        return row
    _, least, most, is_least_valid, meaning = next(bounds for bounds in _BOUNDS if key.startswith(bounds[0]))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (value == least and not is_least_valid):
        start = f"from {least:g}" if is_least_valid else f"above {least:g}"
        raise InvalidEntry(key, f"expected {meaning}, {start} and up to {most:g}", value)
    return float(value)
