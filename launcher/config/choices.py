"""The choices of the configuration groups: the files of the trees."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path

from launcher.errors import nearest

# A number of parameters in a name: 126m, 1.3b, 1b3.
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([mbt])(\d*)(?![a-z0-9])")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_FAR = 4.0  # a size that differs by this factor is another one
_ABOUT = 1.5  # without a family, all that are nearer


def options_of(group: str, roots: Sequence[Path]) -> list[str]:
    """Return the choices of a group, such as ``gpt3/126m``, without files that start with `_`."""
    folders = [root / group for root in roots if (root / group).is_dir()]
    files = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.yaml")]
    return sorted({str(name.with_suffix("")) for name, path in files if path.name[0] != "_"})


def about(group: str, choice: str, roots: Sequence[Path]) -> str | None:
    """Return the first comment in the file of a choice, up to a full stop."""
    path = next((file for root in roots if (file := root / group / f"{choice}.yaml").is_file()), None)
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence, stop, _ = comment.partition(". ")
    return (sentence if stop else comment.removesuffix(".")) or None


def choice_hint(choice: str, options: Sequence[str]) -> str:
    """Suggest the nearest choice, and list those of the same family, or all."""
    family = choice.split("/")[0]
    near = [name for name in options if name.startswith(f"{family}/")] or list(options)
    listing = f"valid: {', '.join(near) or 'none'}"
    # A family, or a part of files (`_base`), is near to all of them and to none.
    is_part = "/_" in f"/{choice}"
    is_family = choice == family and any(name.startswith(f"{family}/") for name in near)
    suggestions = [] if is_part or is_family else _nearest(choice, near)
    return f"did you mean {' or '.join(map(repr, suggestions))}? {listing}" if suggestions else listing


def nearest_choice(choice: str, options: Sequence[str]) -> str | None:
    """Return the choice that is most likely meant, of the same family where there is one."""
    family = choice.split("/")[0]
    near = [name for name in options if name.startswith(f"{family}/")] or list(options)
    candidates = [*_nearest(choice, near), *(near if len(near) < len(options) else [])]
    return candidates[0] if candidates else None


def parameters_in(name: str) -> float | None:
    """Return the number of parameters that the name of a model size states, such as 1.3e9 of ``gpt3/1b3``."""
    match = _SIZE.search(name.lower())
    if match is None:
        return None
    number, unit, rest = match.groups()
    return float(f"{number}.{rest}" if rest and "." not in number else number) * _UNITS[unit]


def _nearest(choice: str, options: Sequence[str]) -> list[str]:
    """Return the choices nearest in size, if the name states one and any is similar, else in spelling."""
    target = parameters_in(choice)
    if not target:
        return nearest(choice, options)

    def distance(option: str) -> float:
        return abs(math.log((parameters_in(option) or math.inf) / target))

    def order(option: str) -> tuple[float, float]:
        return round(distance(option), 6), -SequenceMatcher(None, choice.lower(), option).ratio()

    ordered = sorted((name for name in options if distance(name) < math.log(_FAR)), key=order)
    if "/" in choice or not ordered or distance(ordered[0]) == 0:
        return ordered[:1]
    # Without a family: the nearest of each.
    best: dict[str, str] = {}
    for name in ordered:
        if distance(name) < math.log(_ABOUT):
            best.setdefault(name.partition("/")[0], name)
    return list(best.values())
