"""Configuration trees composed with Hydra's loader, of which those that differ in values are composed once.

Hydra's own node, which a launch drops, is not composed. What needs more than that raises `NeedsFullCompose`,
and is composed by Hydra's own way (`HydraTree`). The versions of Hydra and OmegaConf are pinned; the tests
compare the results with Hydra's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from launcher.config.hydra_setup import config_loader, once_in_unchanged_tree
from launcher.config.overrides import MAIN, NoSuchChoice, for_hydra
from launcher.errors import Mistakes, UserError, escape

Choices = Mapping[str, str | None]
KeyPath = tuple[Any, ...]

# OmegaConf's words for a circle of references, and Python's.
_CIRCULAR = re.compile(r"recursive interpolation|parent node|recursion depth", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
# Characters of a resolved tree: references to references multiply.
_MOST_CHARACTERS = 1 << 22


class NeedsFullCompose(Exception):
    """A case that needs Hydra's own way: unknown to this module, or a mistake."""


class ComposedTree:
    """A tree, the choices of its groups, and the overrides that chose them."""

    def __init__(self, tree: DictConfig, choices: Choices, key: tuple[str, ...]) -> None:
        self.tree, self.choices, self.key = tree, choices, key

    def set(self, key: str, value: Any) -> None:
        """Set a key, which need not be there."""
        OmegaConf.update(self.tree, key, value, force_add=True)

    def resolved(self) -> dict[str, Any]:
        """Return the values, with every interpolation resolved."""
        _check_size(OmegaConf.to_container(self.tree))
        try:
            return cast(
                "dict[str, Any]", OmegaConf.to_container(self.tree, resolve=True, throw_on_missing=True)
            )
        except MissingMandatoryValue as error:
            from launcher.config.tree_mistakes import MissingValue

            missing = sorted(OmegaConf.missing_keys(self.tree))
            raise Mistakes([MissingValue(key) for key in missing]) from error
        except InterpolationResolutionError as error:
            circle = _circle(OmegaConf.to_container(self.tree)) if _CIRCULAR.search(str(error)) else []
            if not circle:
                raise
            key, *others = [".".join(map(str, path)) for path in circle]
            way = f", by way of {' and '.join(others)}" if others else ""
            message, hint = f"{key}: it refers to itself{way}", "give it a value of its own"
            raise UserError(message, key=key, also=others, hint=hint) from error


class HydraTree(ComposedTree):
    """A tree that is composed by Hydra, with its own node."""

    def __init__(self, overrides: Sequence[str], roots: Sequence[Path], primary: str = MAIN) -> None:
        typed = for_hydra(overrides, primary)
        tree = config_loader(tuple(roots)).load_configuration(primary, typed, RunMode.RUN, from_shell=False)
        OmegaConf.set_struct(tree, False)
        super().__init__(tree, tree.pop("hydra").runtime.choices, tuple(overrides))


class TreeComposer:
    """Composes trees; with `once`, keeps no file for a further one."""

    def __init__(self, roots: tuple[Path, ...], *, once: bool = False) -> None:
        self._loader = config_loader(roots, once=once)
        self._files = self._loader.repository
        self._parsed: dict[str, Override] = {}
        self._trees: dict[tuple[str, ...], tuple[DictConfig, Choices]] = {}

    def compose(self, overrides: Sequence[str]) -> ComposedTree:
        """Compose a tree."""
        values, groups = self._sorted(for_hydra(overrides))
        key = tuple(str(override.input_line) for override in groups)
        if key not in self._trees:
            self._trees[key] = self._compose_groups(groups)
        tree, choices = copy.deepcopy(self._trees[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, tree)
        return ComposedTree(tree, choices, key)

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


def _check_size(plain: Any) -> None:
    """Raise UserError if plain references make too long a value; a circle is OmegaConf's to find."""
    sizes: dict[KeyPath, int] = {}

    def size_of(key: KeyPath) -> int:
        if key not in sizes:
            sizes[key] = 0
            for path, value in _leaves(_at(plain, key), key):
                sizes[key] += len(str(value)) + sum(map(size_of, _targets(path, value)))
            if sizes[key] > _MOST_CHARACTERS:
                name = ".".join(map(str, key))
                raise UserError(f"{escape(name)}: its references make too long a value", key=name)
        return sizes[key]

    with suppress(RecursionError):
        size_of(())


def _circle(plain: Any, key: KeyPath = (), way: tuple[KeyPath, ...] = ()) -> list[KeyPath]:
    """Return the keys on the way from a value to itself by plain references, if there is such a way."""
    if circle := list(dropwhile(lambda path: path[: len(key)] != key, way)):
        return circle
    for path, value in _leaves(_at(plain, key), key):
        for target in _targets(path, value):
            if circle := _circle(plain, target, (*way, path)):
                return circle
    return []


def _at(plain: Any, key: KeyPath) -> Any:
    for name in key:
        if not isinstance(plain, dict) or name not in plain:
            return None
        plain = plain[name]
    return plain


def _targets(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    for dots, names in _REFERENCE.findall(value) if isinstance(value, str) else ():
        yield (*(path[: len(path) - len(dots)] if dots else ()), *names.split("."))


def _leaves(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(node, (dict, list)):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, (*path, name))
    else:
        yield path, node
