"""A composed tree to plain values, quickly.

OmegaConf parses each interpolation with a full grammar whenever it is asked. Nearly all of them are plain
references, ``${a.b}``, ``${.b}`` or text around some, or calls of our own functions with such. These are
looked up here, the others left to OmegaConf.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from launcher.config.resolvers import PURE

Path = tuple[Any, ...]

_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
# Text and references; an escape or a resolver makes it another matter.
_PLAIN = re.compile(rf"(?:[^$\\{{}}]|{_REFERENCE.pattern})+", re.ASCII)
# ${multiply:${a.b}, 4}
_ARGUMENT = rf"\s*(?:\d+|{_REFERENCE.pattern})\s*"
_CALL = re.compile(rf"\$\{{(\w+):({_ARGUMENT}(?:,{_ARGUMENT})*)\}}", re.ASCII)


class OutOfTheOrdinary(Exception):
    """A case that needs Hydra and OmegaConf: unknown to this module, or a mistake."""


class Resolution:
    """The values of one tree, each reference resolved once."""

    def __init__(self, tree: DictConfig) -> None:
        self._tree = tree
        self._plain: dict[str, Any] = OmegaConf.to_container(tree, resolve=False)  # type: ignore[assignment]
        self._open = dict.fromkeys(_interpolations(self._plain))

    def plain(self) -> dict[str, Any]:
        """Resolve everything.

        Raises
        ------
        OutOfTheOrdinary, OmegaConfBaseException
            If a value is missing, or a reference leads nowhere.
        """
        while self._open:
            self._resolve(next(reversed(self._open)))
        return self._plain

    def _resolve(self, path: Path) -> None:
        """Put the value in the place of the text that refers to it."""
        del self._open[path]  # what refers to itself is found as text, below
        parent = self._plain
        for name in path[:-1]:
            parent = parent[name]
        text = parent[path[-1]]
        call = _CALL.fullmatch(text)
        if call and call[1] in PURE:
            parent[path[-1]] = PURE[call[1]](*self._arguments(call[2], path))
        elif _PLAIN.fullmatch(text):
            parent[path[-1]] = self._value(text, path)
        else:
            parent[path[-1]] = self._asked(path)

    def _arguments(self, text: str, path: Path) -> Iterator[Any]:
        for part in map(str.strip, text.split(",")):
            found = _REFERENCE.fullmatch(part)
            yield self._referred(found, path) if found else int(part)

    def _value(self, text: str, path: Path) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole:
            return copy.deepcopy(self._referred(whole, path))
        return _REFERENCE.sub(lambda found: self._as_text(found, path), text)

    def _as_text(self, found: re.Match[str], path: Path) -> str:
        value = self._referred(found, path)
        if isinstance(value, (dict, list)):
            raise OutOfTheOrdinary(path)
        return str(value)

    def _referred(self, found: re.Match[str], path: Path) -> Any:
        """Return the value that a reference points to, resolved."""
        dots, names = found.groups()
        if len(dots) > len(path):
            raise OutOfTheOrdinary(path)
        target = (*path[: len(path) - len(dots)], *names.split(".")) if dots else tuple(names.split("."))
        node: Any = self._plain
        for depth, name in enumerate(target, 1):
            if not isinstance(node, dict) or name not in node:
                raise OutOfTheOrdinary(path)
            if target[:depth] in self._open:
                self._resolve(target[:depth])
            node = node[name]
        for below in [other for other in self._open if other[: len(target)] == target]:
            self._resolve(below)
        if isinstance(node, str) and "${" in node:
            raise OutOfTheOrdinary(path)  # escaped, or a circle
        return node

    def _asked(self, path: Path) -> Any:
        """Return the value as OmegaConf resolves it."""
        node: Any = self._tree
        for name in path:
            node = node[name]
        if isinstance(node, (DictConfig, ListConfig)):
            return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        return node


def _interpolations(node: Any, path: Path = ()) -> Iterator[Path]:
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (dict, list)):
            yield from _interpolations(value, (*path, name))
        elif isinstance(value, str):
            if value == "???":
                raise OutOfTheOrdinary(path)
            if "${" in value:
                yield (*path, name)
