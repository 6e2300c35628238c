"""Which CUDA a driver runs: NVIDIA's table of minimum drivers, and what an image asks of one.

The table is that of "CUDA Compatibility" (docs.nvidia.com/deploy/cuda-compatibility, "Minor Version
Compatibility": all releases of 11.x, 12.x and 13.x run on the first driver of their family, with limited
features; those of 10.x need the driver of their own release). The last places of 11 and 12 are those of the
CUDA Toolkit's release notes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from launcher.releases import version as version

# By CUDA release, or by its family: the oldest driver of Linux that runs it.
_FAMILIES = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
_RELEASES = {(10, 0): (410, 48), (10, 1): (418, 39), (10, 2): (440, 33)}

_CONDITION = re.compile(r"(cuda|driver)(>=|<=|<|>|!=|=)([\d.]+)")


class Verdict(NamedTuple):
    """Whether a driver runs a CUDA release: `runs` is ``None`` where the table does not tell."""

    runs: bool | None
    minimum: str | None = None


def minimum_driver(cuda: str) -> tuple[int, ...] | None:
    """The oldest driver that runs a CUDA release; ``None`` where the table has none."""
    numbers = version(cuda)
    if len(numbers) < 2:
        return None
    return _RELEASES.get((numbers[0], numbers[1]), _FAMILIES.get(numbers[0]))


def verdict(driver: str, cuda: str) -> Verdict:
    """Whether a driver runs a CUDA release, without a compatibility package."""
    least = minimum_driver(cuda)
    if least is None:
        return Verdict(None)
    return Verdict(version(driver) >= least, ".".join(f"{number:02}" for number in least))


def fulfils(driver: str, driver_cuda: str | None, requires: str) -> bool:
    """Whether nvidia-container-cli takes a driver for an image's ``NVIDIA_REQUIRE_CUDA``.

    Blanks are between alternatives, commas within one. Brands are taken for granted: they are those of data
    centers.
    """
    known = {"driver": version(driver), "cuda": version(driver_cuda)}
    return any(
        all(_holds(condition, known) for condition in alternative.split(","))
        for alternative in requires.split()
    )


def _holds(condition: str, known: dict[str, tuple[int, ...]]) -> bool:
    found = _CONDITION.fullmatch(condition)
    if found is None or not known[found[1]]:
        return True
    wanted = version(found[3])
    # `driver<536` is about its first number alone.
    have = known[found[1]][: len(wanted)]
    return {
        ">=": have >= wanted,
        "<=": have <= wanted,
        "<": have < wanted,
        ">": have > wanted,
        "=": have == wanted,
        "!=": have != wanted,
    }[found[2]]
