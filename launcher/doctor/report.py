"""The doctor's report: findings about one thing on one machine, or on several that agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from launcher.checks.findings import Finding, Severity

# Lines about one thing are adjacent, for all machines.
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


def thing(
    what: str,
    message: str,
    fix: str | None = None,
    *,
    severity: Severity,
    needed: bool = False,
    free: int | None = None,
) -> Finding:
    return Finding(severity, None, message, fix, id=what, needed=needed, free=free)


ok = partial(thing, severity=Severity.OK)
warning = partial(thing, severity=Severity.WARNING)
missing = partial(thing, severity=Severity.MISSING)
unknown = partial(thing, severity=Severity.UNKNOWN)


def merged(reports: Iterable[tuple[str, Iterable[Finding]]]) -> list[Finding]:
    """Merge equal lines of several machines into one, with the least of their free bytes."""
    groups: dict[object, list[Finding]] = {}
    for name, lines in reports:
        for line in lines:
            # Which machine needs a thing matters only if it is missing.
            is_lacking = line.needed and line.severity in (Severity.MISSING, Severity.UNKNOWN)
            key = (line.id, line.severity, line.message, line.fix, is_lacking)
            groups.setdefault(key, []).append(replace(line, where=(name,)))
    together = []
    for group in groups.values():
        least, names = min(group, key=lambda line: line.free or 0), [line.where[0] for line in group]
        is_needed = any(line.needed for line in group)
        together.append(replace(least, needed=is_needed, where=tuple(names)))
    # sorted() keeps the order of machines among lines about the same thing.
    return sorted(together, key=lambda line: _ORDER.index(line.id))


def lacking(report: Iterable[Finding], severity: Severity = Severity.MISSING) -> list[Finding]:
    """Return the lines of a severity about things that the launch needs."""
    return [line for line in report if line.needed and line.severity is severity]


def release_status(release: str, tested: Sequence[str]) -> tuple[Severity, str]:
    """Compare a release with the tested ones, which are in ascending order.

    Return OK within their range, WARNING outside; and a note, empty for a tested release. The release is the
    year and month of a Slurm, or major and minor number of a Python.
    """
    number, *numbers = (
        (int(match[1]), int(match[2])) if (match := _RELEASE.match(text)) else (0, 0)
        for text in (release, *tested)
    )
    if number in numbers:
        return Severity.OK, ""
    is_within = numbers[0] <= number <= numbers[-1]
    return Severity.OK if is_within else Severity.WARNING, f"the tests were run on {', '.join(tested)}"
