"""Placeholders that were left in values: ``<Your partition>``, ``CHANGEME``, ``/path/to/data``.

Slurm would queue a job for a partition of such a name, or mount a directory that nobody has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import UserError, one_line, shortened, shown
from launcher.secrecy import MASK, hidden

if TYPE_CHECKING:
    from launcher.config.sources import Sources

# What is a placeholder in any value. Tokenizers have <s>, <mask> and <extra_id_0>, packages numpy<3.
_ANYWHERE = (
    r"<\s*(?i:your|insert|enter|replace|fill|put|path|change|add)(?![a-z])[^<>]*>",
    r"<[A-Za-z][\w.-]*(?: +[\w.-]+)+>",
    r"‹[^‹›]+›",
    r"(?<![A-Za-z0-9])(?i:(?:change|replace|edit|fill)[-_]?me)(?![A-Za-z0-9])",
    r"(?<![A-Za-z0-9])(?i:your)[-_][\w.-]+",
    r"(?:^|(?<=[/:,=]))/?path/to(?=/|$)",
)
# In the keys that are ours, whose values are names and paths.
_IN_NAMES = (
    r"<[A-Za-z][\w .-]{2,}>",
    r"\{\{\s*[\w. ]+?\s*\}\}",
    r"(?:^|(?<=/))(?:TODO|TBD|FIXME|X{3,8}|\.{3,}|…)(?=/|$)",
)
_CERTAIN = re.compile("|".join(_ANYWHERE))
_LIKELY = re.compile("|".join((*_ANYWHERE, *_IN_NAMES)))

# NeMo's nodes and variables hold text of any kind; in a comment a placeholder does no harm.
_FREE = re.compile(r"training\.(trainer|exp_manager|model)\.|(.*\.)?env_vars\.|image\.env\.", re.DOTALL)
_PROSE = re.compile(r".*\.(comment|notes|description)|image\.labels\..*", re.DOTALL)

# How a value stands in the tree; ``None`` where that is not plain.
Stated = Callable[[str], str | None]


class Placeholder(UserError):
    """A placeholder in the value of a key."""

    def __init__(self, key: str, value: str, text: str) -> None:
        seen = hidden(key, value)
        what = "a placeholder, not a value"
        if seen != MASK and value.strip() != text:
            what = f"a placeholder was left in it: {shortened(one_line(text))}"
        hint = f"put your own in its place: {one_line(key)}=..."
        if key.startswith(("cluster.", "stage_cluster.")):
            hint += "; null leaves it out"
        super().__init__(
            f"{one_line(key)}={seen if seen == MASK else shown(value)}: {what}", key=key, hint=hint
        )
        self.text = text


def placeholders_in(node: Mapping[str, Any], sources: Callable[[], Sources]) -> list[Placeholder]:
    """Return a mistake for each value in which a placeholder was left.

    Values that only refer to such a placeholder are not texts again.

    Parameters
    ----------
    node
        The tree, every interpolation resolved.
    """
    placeholders = list(_placeholders_below(node))
    if len(placeholders) < 2:
        return placeholders
    stated = sources().stated
    written = [placeholder for placeholder in placeholders if _stands_there(placeholder, stated)]
    texts = {placeholder.text for placeholder in written}
    return [
        placeholder for placeholder in placeholders if placeholder in written or placeholder.text not in texts
    ]


def _stands_there(mistake: Placeholder, stated: Stated) -> bool:
    text = stated(str(mistake.key))
    return text is not None and (mistake.text in text or "oc.env" in text)


def _placeholders_below(
    node: Mapping[str, Any] | Sequence[Any], path: tuple[str, ...] = ()
) -> Iterator[Placeholder]:
    for name, value in node.items() if isinstance(node, Mapping) else ((None, item) for item in node):
        below = path if name is None else (*path, str(name))
        if isinstance(value, (dict, list)):
            yield from _placeholders_below(value, below)
        elif isinstance(value, str) and _LIKELY.search(value):
            yield from _judged(".".join(below), value)


def _judged(key: str, value: str) -> Iterator[Placeholder]:
    text = placeholder_in(key, value)
    if text is not None:
        yield Placeholder(key, value, text)


def placeholder_in(key: str, value: str) -> str | None:
    """Return the placeholder in the value of a key, if there is one."""
    if _PROSE.fullmatch(key):
        return None
    match = (_CERTAIN if _FREE.match(key) else _LIKELY).search(value)
    return match[0] if match else None
