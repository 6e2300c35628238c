"""The points of a sweep: overrides with several values each, multiplied out as Hydra's own sweeper does."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException

from launcher.config.compose import list_options
from launcher.config.overrides import GROUPS, is_text, parse_override
from launcher.errors import UserError, one_line

# More are a slip: the controller of a cluster holds ten thousand jobs by default, of all users together.
MOST_POINTS = 10_000

# Directories, jobs and logs are called after points, and file systems take names of 255 bytes.
_LONGEST_NAME = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
# Where every comma and bracket belongs to the values, they are taken as they were typed: 3e-4, not 0.0003.
_PLAIN = re.compile(r"[^\[\]{}()'\"\\]+")
# What a sweep decides itself, whatever stands before it.
_OURS = (".stages", ".run.name", ".run.results_dir")


@dataclass(frozen=True, slots=True)
class Axis:
    """A key that is swept, with its sign if it has one, and its values as the command line takes them."""

    key: str
    values: tuple[str, ...]

    @property
    def plain_key(self) -> str:
        return self.key.lstrip("+~")


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A point of a grid: its name, its overrides, and the value of each swept key."""

    name: str
    overrides: tuple[str, ...]
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Grid:
    """The overrides that all points of a sweep share, and its axes, the last of which changes fastest."""

    shared: tuple[str, ...]
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def labels(self) -> dict[str, str]:
        """The name of each swept key in tables: its last words, as many as tell it apart."""
        keys = [axis.plain_key for axis in self.axes]
        return {key: _shortest(key, keys) for key in keys}

    def points(self) -> list[GridPoint]:
        """Return all points, in order."""
        labels, points = self.labels, []
        for values in itertools.product(*(axis.values for axis in self.axes)):
            pairs = list(zip(self.axes, values, strict=True))
            overrides = tuple(f"{axis.key}={value}" for axis, value in pairs)
            by_key = {axis.plain_key: value for axis, value in pairs}
            name = "_".join(f"{labels[key]}={_safe(value)}" for key, value in by_key.items())
            points.append(GridPoint(name, overrides, by_key))
        # What the values have in letters that no file's name should have may be all that tells them apart.
        counted = Counter(point.name for point in points)
        return [
            _with_digest(point) if counted[point.name] > 1 or len(point.name) > _LONGEST_NAME else point
            for point in points
        ]


def read_grid(overrides: Sequence[str], config_dir: Path | None = None) -> Grid:
    """Take a command line apart into what is swept and what is not.

    Parameters
    ----------
    config_dir
        A tree of the user's own, whose choices ``glob(...)`` finds too.

    Raises
    ------
    UserError
        If nothing is swept, or something that cannot be.
    """
    shared: list[str] = []
    axes: list[Axis] = []
    for text in overrides:
        axis = _axis(text, config_dir)
        if axis is None:
            shared.append(text)
        else:
            axes.append(axis)
    grid = Grid(tuple(shared), tuple(axes))
    _check(grid)
    return grid


def _axis(text: str, config_dir: Path | None) -> Axis | None:
    """Return the axis of an override; ``None`` if it has one value, or a mistake that composing reports."""
    parsed = _parsed(text)
    if parsed is None or not parsed.is_sweep_override():
        return None
    key = parsed.get_key_element()
    if not parsed.is_discrete_sweep():
        raise UserError(
            f"{one_line(text)}: an interval has no number of values",
            key=key.lstrip("+~"),
            hint=f"{one_line(key)}=1,2,4, choice(...) or range(START,STOP,STEP)",
        )
    return Axis(key, tuple(_values(text, parsed, config_dir)))


def _parsed(text: str) -> Override | None:
    """Parse an override as Hydra does; return ``None`` for text, or what is no override.

    Of a key whose value is text a comma is a part of it, so that only ``choice(...)`` sweeps.
    """
    try:
        override = parse_override(text)
        if is_text(override) and not (override.value or "").startswith("choice("):
            return None
        (parsed,) = OverridesParser.create().parse_overrides([text])
        return parsed
    except (UserError, HydraException):
        return None


def _values(text: str, parsed: Override, config_dir: Path | None) -> list[str]:
    value: object = parsed.value()
    if isinstance(value, Glob):
        return _matching(text, parsed, value, config_dir)
    typed = parse_override(text).value or ""
    if is_text(parse_override(text)):
        return [_text(item) for item in parsed.sweep_iterator()]
    if _PLAIN.fullmatch(typed):
        return [part.strip() for part in typed.split(",")]
    return list(parsed.sweep_string_iterator())


def _text(item: object) -> str:
    return item.text if isinstance(item, QuotedString) else str(item)


def _matching(text: str, parsed: Override, glob: Glob, config_dir: Path | None) -> list[str]:
    group = parsed.key_or_group
    if group not in GROUPS:
        raise UserError(f"{one_line(text)}: glob() chooses files, and {one_line(group)} is a value")
    options = list_options(group, config_dir)
    matches = [
        name
        for name in options
        if any(fnmatch.fnmatch(name, pattern) for pattern in glob.include)
        and not any(fnmatch.fnmatch(name, pattern) for pattern in glob.exclude)
    ]
    if not matches:
        raise UserError(f"{one_line(text)}: no choice is called so", key=group, hint=f"slipway list {group}")
    return matches


def _check(grid: Grid) -> None:
    if not grid.axes:
        raise UserError(
            "nothing is swept: no override has several values",
            hint="several are training.model.optim.lr=1e-4,3e-4, choice(...) or range(START,STOP,STEP)\n"
            "to launch one training: slipway launch",
        )
    for key in (parse_override(text).key for text in grid.shared):
        if key.endswith(".run.results_dir"):
            message = f"{one_line(key)}: each point has a directory of its own, below that of the sweep"
            raise UserError(
                message, key=key, hint="base_results_dir=DIR, and --name for the sweep's below it"
            )
    for axis in grid.axes:
        key = one_line(axis.plain_key)
        if f".{axis.plain_key}".endswith(_OURS):
            hint = "--name is the sweep's; each point is called after its values"
            raise UserError(f"{key} cannot be swept", key=axis.plain_key, hint=hint)
        again = [value for value, count in Counter(axis.values).items() if count > 1]
        if again:
            raise UserError(f"{key}: the value {one_line(again[0])} is there twice", key=axis.plain_key)
    twice = [key for key, count in Counter(axis.plain_key for axis in grid.axes).items() if count > 1]
    if twice:
        raise UserError(f"{one_line(twice[0])} is swept twice", key=twice[0])
    if grid.size > MOST_POINTS:
        lengths = " × ".join(str(len(axis.values)) for axis in grid.axes)
        raise UserError(f"{lengths} are {grid.size} points: a sweep has {MOST_POINTS} at most")


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        label = ".".join(parts[-count:])
        if sum(other == label or other.endswith(f".{label}") for other in keys) == 1:
            return label
    return key


def _safe(value: str) -> str:
    return _UNSAFE.sub("-", value).strip("-") or "-"


def _with_digest(point: GridPoint) -> GridPoint:
    digest = hashlib.sha256("\n".join(point.overrides).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return GridPoint(f"{point.name[: _LONGEST_NAME - 9]}-{digest}", point.overrides, point.values)
