"""Keys of the configuration, each a row: its reader, and what follows from it.

The rows are the annotations of the fields that hold the values. The table of keys, the settings, the
checkpoint's description, the comparison with a checkpoint and megatron-core's options are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from slipway.trainer.config.values import Values

Kind = TypeVar("Kind")
# It gets the whole key, and may look at others.
Reader = Callable[[Values, str], Any]

SIZE: Reader = partial(Values.integer, minimum=1)
COUNT: Reader = partial(Values.integer, default=0, minimum=0)
NUMBER: Reader = partial(Values.number, minimum=0.0)
ON: Reader = partial(Values.flag, default=True)
OFF: Reader = partial(Values.flag, default=False)


def path(values: Values, key: str) -> Path:
    return Path(values.text(key))


def optional(read: Reader) -> Reader:
    """Return a reader of a key that may be null."""
    return lambda values, key: read(values, key) if values.is_set(key) else None


@dataclass(frozen=True)
class Row:
    """A key, and what follows from it.

    `key` is NeMo's, a name alone if each stack of layers has one, and `also` are further keys that its reader
    takes. Without a reader the value is computed where the others are read. It decides the `shapes` of the
    weights, the `function` that they compute, or neither, so that it may change between launches.
    `megatron` is megatron-core's option of the same value, and `on_cpu` says why a CPU has no use for it.
    """

    key: str
    read: Reader | None = None
    decides: Literal["shapes", "function"] | None = None
    megatron: str | None = None
    also: tuple[str, ...] = ()
    on_cpu: str | None = None

    def build_key(self, node: str) -> str:
        """Return the whole key in the node of a stack."""
        return self.key if "." in self.key else f"{node}.{self.key}"


@cache
def rows_of(kind: Any) -> Mapping[str, Row]:
    """Return the rows of a dataclass by its fields."""
    hints = get_type_hints(kind, include_extras=True).items()
    parts = {name: getattr(hint, "__metadata__", ()) for name, hint in hints}
    return {name: part[0] for name, part in parts.items() if part}


def read_rows(kind: Callable[..., Kind], values: Values, node: str = "model", **others: Any) -> Kind:
    """Return a dataclass with the values of its rows, and those of the fields that have no reader.

    Raises
    ------
    UserError
        Naming the key, its value and the valid ones.
    """
    read = {name: row.read(values, row.build_key(node)) for name, row in rows_of(kind).items() if row.read}
    return kind(**read, **others)


def keys_read(*kinds: Any) -> Iterator[tuple[str, Row]]:
    """Yield the keys that the readers of some dataclasses take, each with its row."""
    for row in (row for kind in kinds for row in rows_of(kind).values() if row.read):
        yield from ((key, row) for key in (row.key, *row.also))
