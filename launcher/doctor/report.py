"""Lines of the doctor's report: one thing on one machine, or on several that agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import partial

# Lines about one thing stand together, whichever machine they are about.
_ORDER = (
    "trees",
    *("slurm", "slurm.accounting", "slurm.select", "slurm.cgroups", "slurm.nodes", "nodes"),
    *("pyxis", "pyxis.plugin", "pyxis.runtime", "image", "image.engine", "image.stage"),
    *("enroot", "enroot.runtime", "enroot.data", "enroot.cache", "enroot.temp", "enroot.mqueue"),
    *("enroot.hooks", "user namespaces", "container", "apptainer", "images.build", "images.copy"),
    *("images.unpack", "squashfs.make", "squashfs.mount", "credentials", "gpu", "gpu.image"),
    *("python", "trainer", "extra containers", "extra plot"),
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
    """One thing, such as ``enroot.runtime``, on the machines `where` it is so.

    It is `needed` if the launch cannot do without it. `free` are free bytes, which are not part of the text
    because they differ on every machine.
    """

    what: str
    text: str
    fix: str | None = None
    _: KW_ONLY
    status: Status
    needed: bool = False
    free: int | None = None
    where: tuple[str, ...] = ()


ok = partial(Line, status=Status.OK)
warning = partial(Line, status=Status.WARNING)
missing = partial(Line, status=Status.MISSING)
unknown = partial(Line, status=Status.UNKNOWN)


def merged(reports: Iterable[tuple[str, Iterable[Line]]]) -> list[Line]:
    """Merge equal lines of several machines into one, with the least of their free bytes."""
    groups: dict[object, list[Line]] = {}
    for name, lines in reports:
        for line in lines:
            # For a thing that is there it does not matter which machine needs it.
            is_lacking = line.needed and line.status in (Status.MISSING, Status.UNKNOWN)
            key = (line.what, line.status, line.text, line.fix, is_lacking)
            groups.setdefault(key, []).append(replace(line, where=(name,)))
    together = []
    for group in groups.values():
        least, names = min(group, key=lambda line: line.free or 0), [line.where[0] for line in group]
        is_needed = any(line.needed for line in group)
        together.append(replace(least, needed=is_needed, where=tuple(names)))
    # sorted() keeps the order of machines among lines about the same thing.
    return sorted(together, key=lambda line: _ORDER.index(line.what))


def lacking(report: Iterable[Line], status: Status = Status.MISSING) -> list[Line]:
    """Return the lines of things that are missing, or have another status, and that the launch needs."""
    return [line for line in report if line.needed and line.status is status]


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
