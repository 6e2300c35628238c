"""What is told of one thing on one machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

# What belongs together stands together, whichever machine has told it.
_ORDER = (
    "slurm",
    "slurm.accounting",
    "slurm.select",
    "slurm.cgroups",
    "slurm.nodes",
    "nodes",
    "pyxis",
    "pyxis.plugin",
    "pyxis.runtime",
    "image",
    "image.engine",
    "image.stage",
    "enroot",
    "enroot.runtime",
    "enroot.data",
    "enroot.cache",
    "enroot.temp",
    "enroot.mqueue",
    "enroot.hooks",
    "user namespaces",
    "container",
    "apptainer",
    "images.build",
    "images.copy",
    "images.unpack",
    "squashfs.make",
    "squashfs.mount",
    "credentials",
    "gpu",
    "gpu.image",
    "python",
    "trainer",
    "extra containers",
    "extra plot",
)


class Status(StrEnum):
    """How a thing is; `UNKNOWN` where nobody could be asked."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing on one machine.

    Attributes
    ----------
    what
        Its name, such as ``enroot.runtime``.
    found
        What there is, or what is wrong.
    fix
        What to do about it.
    needed
        The launch that is asked about cannot do without it.
    free
        Bytes that are free there, which are not part of `found`: they differ on every machine.
    """

    what: str
    status: Status
    found: str
    fix: str | None = None
    needed: bool = False
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line, and the machines of which it is true."""

    line: Line
    where: tuple[str, ...]


def rows(told: Iterable[tuple[str, Sequence[Line]]]) -> list[Row]:
    """Put lines of several machines together that say the same; the least of free bytes is told."""
    together: dict[tuple[object, ...], list[tuple[str, Line]]] = {}
    for where, lines in told:
        for line in lines:
            # Of what is there it does not matter who needs it.
            matters = line.needed and line.status in (Status.MISSING, Status.UNKNOWN)
            key = (line.what, line.status, line.found, line.fix, matters)
            together.setdefault(key, []).append((where, line))
    found = []
    for same in together.values():
        least = min((line for _, line in same), key=lambda line: line.free or 0)
        is_needed = any(line.needed for _, line in same)
        found.append(Row(replace(least, needed=is_needed), tuple(where for where, _ in same)))
    # sorted() keeps the machines' own order among what is about the same thing.
    return sorted(found, key=lambda row: _ORDER.index(row.line.what))


def gib(size: int) -> str:
    """Bytes, as people read them."""
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.0f} MiB"


def lacking(found: Iterable[Row]) -> list[Row]:
    """What a launch cannot do without, and is not there."""
    return [row for row in found if row.line.needed and row.line.status is Status.MISSING]


def unknown(found: Iterable[Row]) -> list[Row]:
    """What a launch cannot do without, and nobody could be asked about."""
    return [row for row in found if row.line.needed and row.line.status is Status.UNKNOWN]
