"""Configuration trees composed from within Hydra and OmegaConf, in half of the time of Hydra's own `compose`.

Hydra's own node, which a launch drops, is not composed. Values are read without OmegaConf, which parses each
interpolation with a full grammar whenever it is asked: nearly all of them are plain references, ``${a.b}``,
``${.b}`` or text around some, or calls of our own functions with such. These are looked up here, the others
left to OmegaConf. Trees that differ in values are one tree, which is changed in place and changed back.

What needs more than that raises `NeedsFullCompose`, and is composed by Hydra's own way (`HydraTree`). The
versions of Hydra and OmegaConf are pinned; the tests compare the results with Hydra's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from launcher.config.hydra_setup import PURE, config_loader, once_in_unchanged_tree
from launcher.config.overrides import MAIN, NoSuchChoice, for_hydra, keys_for_hydra, parse_override
from launcher.errors import Mistakes, UserError, escape

Choices = Mapping[str, str | None]
KeyPath = tuple[Any, ...]

# OmegaConf's words for a circle of references, and Python's.
_CIRCULAR = re.compile(r"recursive interpolation|parent node|recursion depth", re.IGNORECASE)


class NeedsFullCompose(Exception):
    """A case that needs Hydra and OmegaConf: unknown to this module, or a mistake."""


class CircularReference(UserError):
    """A key whose value refers to itself, perhaps by way of others."""

    def __init__(self, circle: Sequence[KeyPath]) -> None:
        *others, key = [".".join(map(str, path)) for path in circle]
        way = f", by way of {' and '.join(others)}" if others else ""
        hint = "give it a value of its own"
        super().__init__(f"{key}: it refers to itself{way}", key=key, also=others, hint=hint)


class TreeComposer:
    """Composes trees that share their first overrides; with `once`, keeps no file for a further one."""

    def __init__(self, roots: tuple[Path, ...], shared: Sequence[str] = (), *, once: bool = False) -> None:
        self._loader = config_loader(roots, once=once)
        self._files = self._loader.repository
        self._parsed: dict[str, Override] = {}
        self._trees: dict[tuple[str, ...], tuple[DictConfig, Choices]] = {}
        self._shared = shared

    @contextmanager
    def compose(self, overrides: Sequence[str]) -> Iterator[ComposedTree]:
        """Compose a tree, whose changes are taken back in the end."""
        values, groups = self._sorted(for_hydra(overrides))
        shared, _ = self._sorted(keys_for_hydra([parse_override(text) for text in self._shared]))
        key = tuple(str(override.input_line) for override in groups)
        if key not in self._trees:
            tree, choices = self._compose_groups(groups)
            ConfigLoaderImpl._apply_overrides_to_config(shared, tree)
            self._trees[key] = tree, choices
        composed = ComposedTree(*self._trees[key], key)
        try:
            composed.apply(values[len(shared) :])
            yield composed
        finally:
            composed.take_back()

    def _sorted(self, texts: Iterable[str]) -> tuple[list[Override], list[Override]]:
        """Separate overrides of values from those that choose files."""
        values: list[Override] = []
        groups: list[Override] = []
        for text in texts:
            override = self._parse(text)
            key, value = override.key_or_group, override.value()
            if isinstance(value, dict) or not self._files.group_exists(key):
                values.append(override)
                continue
            is_left_out = override.is_delete() and value is None
            names = value if isinstance(value, list) and not override.is_delete() else [value]
            if not is_left_out and not all(isinstance(name, str) for name in names):  # Hydra fails
                raise NoSuchChoice(key, text.partition("=")[2])
            groups.append(override)
        return values, groups

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            (override,) = OverridesParser.create().parse_overrides([text])
            if override.is_hydra_override() or override.is_sweep_override():
                raise NeedsFullCompose(text)
            self._parsed[text] = override
        return self._parsed[text]

    def _compose_groups(self, groups: list[Override]) -> tuple[DictConfig, Choices]:
        """Return the tree of some groups, and the choices."""
        files = CachingConfigRepository(self._files)
        root = files.load_config(MAIN)
        if root is None or "hydra" in root.config:  # such as a search path
            raise NeedsFullCompose("hydra")
        defaults = create_defaults_list(files, MAIN, groups, prepend_hydra=False, skip_missing=False)
        tree = self._loader._compose_config_from_defaults_list(defaults.defaults, files)
        if "hydra" in tree:
            raise NeedsFullCompose("hydra")
        OmegaConf.set_struct(tree, True)
        return tree, {
            group: str(choice) for group, choice in defaults.overrides.known_choices.items() if choice
        }


tree_composer = once_in_unchanged_tree(TreeComposer)


class ComposedTree:
    """A tree, the choices of its groups, the overrides that chose them, and the changes to take back."""

    def __init__(self, tree: DictConfig, choices: Choices, key: tuple[str, ...]) -> None:
        self.tree, self.choices, self.key = tree, choices, key
        self._before: list[tuple[DictConfig, dict[Any, Any]]] = []

    def apply(self, overrides: Iterable[Override]) -> None:
        """Apply overrides as Hydra does, with a copy in the place of each node that they change."""
        for override in overrides:
            if "[" in override.key_or_group:
                raise NeedsFullCompose(override.key_or_group)
            self.detach(override.key_or_group.split("."))
            ConfigLoaderImpl._apply_overrides_to_config([override], self.tree)

    def detach(self, names: Sequence[str]) -> None:
        """Put a copy in the place of the last node on the way, or of the first that is no mapping."""
        node, (*parents, name) = self.tree, names
        for parent in parents:
            child = _content(node).get(parent)
            if child is not None and child._is_interpolation():
                raise NeedsFullCompose(parent)  # the change would go where it refers to
            if not (isinstance(child, DictConfig) and isinstance(_content(child), dict)):
                name = parent
                break
            node = child
        content = _content(node)
        self._before.append((node, content))
        copied = dict(content)
        if name in copied:
            copied[name] = copy.deepcopy(copied[name])
        node.__dict__["_content"] = copied

    def resolved(self) -> dict[str, Any]:
        """Return the values, with every interpolation resolved."""
        try:
            return _Resolution(self.tree).plain()
        except CircularReference as error:
            raise NeedsFullCompose from error  # OmegaConf resolves no more of a mapping than is referred to

    def set(self, key: str, value: Any) -> None:
        """Set a key, which need not be there."""
        self.detach(key.split("."))
        OmegaConf.update(self.tree, key, value, force_add=True)

    def take_back(self) -> None:
        for node, content in reversed(self._before):
            node.__dict__["_content"] = content


class HydraTree(ComposedTree):
    """A tree that is composed by Hydra, and resolved by OmegaConf."""

    def __init__(self, overrides: Sequence[str], roots: Sequence[Path], primary: str = MAIN) -> None:
        typed = for_hydra(overrides, primary)
        tree = config_loader(tuple(roots)).load_configuration(primary, typed, RunMode.RUN, from_shell=False)
        OmegaConf.set_struct(tree, False)
        super().__init__(tree, tree.pop("hydra").runtime.choices, tuple(overrides))

    def set(self, key: str, value: Any) -> None:
        OmegaConf.update(self.tree, key, value, force_add=True)

    def resolved(self) -> dict[str, Any]:
        try:
            return cast(
                "dict[str, Any]", OmegaConf.to_container(self.tree, resolve=True, throw_on_missing=True)
            )
        except MissingMandatoryValue as error:
            from launcher.config.tree_mistakes import MissingValue

            missing = sorted(OmegaConf.missing_keys(self.tree))
            raise Mistakes([MissingValue(key) for key in missing]) from error
        except InterpolationResolutionError as error:
            if _CIRCULAR.search(str(error)):
                with suppress(NeedsFullCompose, OmegaConfBaseException):
                    _Resolution(self.tree).plain()  # raises the error that names the circle
            raise


def _content(node: DictConfig) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.__dict__["_content"])


_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
# Text and references; an escape or a resolver makes it another matter.
_PLAIN = re.compile(rf"(?:[^$\\{{}}]|{_REFERENCE.pattern})+", re.ASCII)
# ${multiply:${a.b}, 4}
_ARGUMENT = rf"\s*(?:\d+|{_REFERENCE.pattern})\s*"
_CALL = re.compile(rf"\$\{{(\w+):({_ARGUMENT}(?:,{_ARGUMENT})*)\}}", re.ASCII)


class _Resolution:
    """The values of one tree, each reference resolved once."""

    def __init__(self, tree: DictConfig) -> None:
        self._tree = tree
        self._plain: dict[str, Any] = OmegaConf.to_container(tree, resolve=False)  # type: ignore[assignment]
        self._open = dict.fromkeys(_interpolations(self._plain))
        self._resolving: list[KeyPath] = []
        # References to references multiply: characters that all of them may make.
        self._left = 1 << 22

    def plain(self) -> dict[str, Any]:
        """Resolve everything; raise NeedsFullCompose or OmegaConf's errors if a reference leads nowhere."""
        while self._open:
            self._resolve(next(reversed(self._open)))
        return self._plain

    def _resolve(self, path: KeyPath) -> None:
        """Put the value in the place of the text that refers to it."""
        del self._open[path]
        self._resolving.append(path)
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
        self._resolving.pop()

    def _arguments(self, text: str, path: KeyPath) -> Iterator[Any]:
        for part in map(str.strip, text.split(",")):
            match = _REFERENCE.fullmatch(part)
            yield self._referred(match, path) if match else int(part)

    def _value(self, text: str, path: KeyPath) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole:
            value = copy.deepcopy(self._referred(whole, path))
        else:
            value = _REFERENCE.sub(lambda match: self._as_text(match, path), text)
        self._left -= len(str(value))
        if self._left < 0:
            key = ".".join(map(str, path))
            raise UserError(f"{escape(key)}: its references make too long a value", key=key)
        return value

    def _as_text(self, match: re.Match[str], path: KeyPath) -> str:
        value = self._referred(match, path)
        if isinstance(value, (dict, list)):
            raise NeedsFullCompose(path)
        return str(value)

    def _referred(self, match: re.Match[str], path: KeyPath) -> Any:
        """Return the value that a reference points to, resolved."""
        dots, names = match.groups()
        if len(dots) > len(path):
            raise NeedsFullCompose(path)
        target = (*path[: len(path) - len(dots)], *names.split(".")) if dots else tuple(names.split("."))
        if circle := list(dropwhile(lambda other: other[: len(target)] != target, self._resolving)):
            raise CircularReference(circle)
        node: Any = self._plain
        for depth, name in enumerate(target, 1):
            if not isinstance(node, dict) or name not in node:
                raise NeedsFullCompose(path)
            if target[:depth] in self._open:
                self._resolve(target[:depth])
            node = node[name]
        for below in [other for other in self._open if other[: len(target)] == target]:
            self._resolve(below)
        if isinstance(node, str) and "${" in node:
            raise NeedsFullCompose(path)  # escaped
        return node

    def _asked(self, path: KeyPath) -> Any:
        """Return the value as OmegaConf resolves it."""
        node: Any = self._tree
        for name in path:
            node = node[name]
        if isinstance(node, (DictConfig, ListConfig)):
            return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        return node


def _interpolations(node: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, (dict, list)):
            yield from _interpolations(value, (*path, name))
        elif isinstance(value, str):
            if value == "???":
                raise NeedsFullCompose(path)
            if "${" in value:
                yield (*path, name)
