"""Lines of the doctor's report: one thing on one machine, or on several that agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

# Lines about one thing stand together, whichever machine they are about.
_ORDER = (
    *("slurm", "slurm.accounting", "slurm.select", "slurm.cgroups", "slurm.nodes", "nodes"),
    *("pyxis", "pyxis.plugin", "pyxis.runtime", "image", "image.engine", "image.stage"),
    *(
        "enroot",
        "enroot.runtime",
        "enroot.data",
        "enroot.cache",
        "enroot.temp",
        "enroot.mqueue",
        "enroot.hooks",
    ),
    *("user namespaces", "container", "apptainer", "images.build", "images.copy", "images.unpack"),
    *("squashfs.make", "squashfs.mount", "credentials", "gpu", "gpu.image", "python", "trainer"),
    *("extra containers", "extra plot"),
)
# Releases of Slurm and of Python that the tests were run on: the tables of docs/versions.md.
SLURM = ("22.05", "24.11", "26.05")
PYTHON = ("3.11", "3.12", "3.13", "3.14")
_RELEASE = re.compile(r"(\d+)\.(\d+)")


class Status(StrEnum):
    """The status of a thing; `UNKNOWN` where nothing answered."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing on one machine, such as ``enroot.runtime``; `needed` if the launch cannot do without it.

    `free` are free bytes, which are not part of `found` because they differ on every machine.
    """

    what: str
    status: Status
    found: str
    fix: str | None = None
    needed: bool = False
    free: int | None = None


def ok(what: str, text: str, *, needed: bool = False, free: int | None = None) -> Line:
    return Line(what, Status.OK, text, None, needed, free)


def warning(what: str, text: str, fix: str | None = None, *, needed: bool = False) -> Line:
    return Line(what, Status.WARNING, text, fix, needed)


def missing(what: str, text: str, fix: str | None = None, *, needed: bool = False) -> Line:
    return Line(what, Status.MISSING, text, fix, needed)


@dataclass(frozen=True, slots=True)
class Row:
    """A line, and the machines that it is true of."""

    line: Line
    where: tuple[str, ...]


def rows(reports: Iterable[tuple[str, Sequence[Line]]]) -> list[Row]:
    """Put equal lines of several machines into one row, with the least of their free bytes."""
    groups: dict[tuple[object, ...], list[tuple[str, Line]]] = {}
    for where, lines in reports:
        for line in lines:
            # For a thing that is there it does not matter which machine needs it.
            is_lacking = line.needed and line.status in (Status.MISSING, Status.UNKNOWN)
            key = (line.what, line.status, line.found, line.fix, is_lacking)
            groups.setdefault(key, []).append((where, line))
    merged = []
    for group in groups.values():
        least = min((line for _, line in group), key=lambda line: line.free or 0)
        is_needed = any(line.needed for _, line in group)
        merged.append(Row(replace(least, needed=is_needed), tuple(where for where, _ in group)))
    # sorted() keeps the order of machines among rows about the same thing.
    return sorted(merged, key=lambda row: _ORDER.index(row.line.what))


def gib(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.0f} MiB"


def lacking(report: Iterable[Row]) -> list[Row]:
    """Return the rows of things that are missing, and that the launch needs."""
    return [row for row in report if row.line.needed and row.line.status is Status.MISSING]


def unknown(report: Iterable[Row]) -> list[Row]:
    """Return the rows of things that are unknown, and that the launch needs."""
    return [row for row in report if row.line.needed and row.line.status is Status.UNKNOWN]


def release_status(release: str, tested: Sequence[str]) -> tuple[Status, str]:
    """Compare a release with the tested ones, which are in ascending order.

    Return OK within their range, WARNING outside; and a note, empty for a tested release. The release is the
    year and month of a Slurm, or major and minor number of a Python.
    """
    number, *numbers = (
        (int(match[1]), int(match[2])) if (match := _RELEASE.match(text)) else (0, 0)
        for text in (release, *tested)
    )
    if number in numbers:
        return Status.OK, ""
    is_within = numbers[0] <= number <= numbers[-1]
    return Status.OK if is_within else Status.WARNING, f"the tests were run on {', '.join(tested)}"
