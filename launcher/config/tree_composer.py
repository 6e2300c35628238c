"""Configuration trees composed by Hydra, and further ones of the same choices from a copy."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import dropwhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from launcher.config.hydra_setup import start_hydra
from launcher.config.overrides import MAIN, NoSuchChoice, convert_for_hydra
from launcher.errors import Mistakes, UserError, escape, setting_error

KeyPath = tuple[Any, ...]

# OmegaConf's words for a circle of references, and Python's.
_CIRCULAR = re.compile(r"recursive interpolation|parent node|recursion depth", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
# Characters of a resolved tree: references to references multiply.
_MOST_CHARACTERS = 1 << 22


class MissingValue(UserError):
    """A missing value of a key that needs one."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}=???: a value is needed", key=key, hint=f"give one: {key}=...")


class Fault(NamedTuple):
    """An override that cannot be applied, or parsed: `parsed` is ``None`` then."""

    text: str
    parsed: Override | None
    error: HydraException | OmegaConfBaseException


class NotApplied(Exception):
    """The overrides of a composition that cannot be applied."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(", ".join(fault.text for fault in faults))
        self.faults = faults


class ComposedTree(NamedTuple):
    """A tree, the choices of its groups, and the overrides that chose them."""

    tree: DictConfig
    choices: Mapping[str, str]
    key: tuple[str, ...]

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
            missing = sorted(OmegaConf.missing_keys(self.tree))
            raise Mistakes([MissingValue(key) for key in missing]) from error
        except InterpolationResolutionError as error:
            circle = _circle(OmegaConf.to_container(self.tree)) if _CIRCULAR.search(str(error)) else []
            if not circle:
                raise
            key, *others = [".".join(map(str, path)) for path in circle]
            way = f", by way of {' and '.join(others)}" if others else ""
            message, hint = f"{key}: it refers to itself{way}", "give it a value"
            raise setting_error(message, hint, others) from error


class TreeComposer:
    """Composes the trees of a root file."""

    def __init__(self, roots: Sequence[Path], primary: str = MAIN) -> None:
        self.roots, self.primary = roots, primary
        self._pickled: dict[tuple[str, ...], bytes] = {}

    def compose(self, overrides: Sequence[str]) -> ComposedTree:
        composed = self._by_hydra(convert_for_hydra(overrides, self.primary))
        OmegaConf.set_struct(composed.tree, False)
        return composed

    def compose_again(self, overrides: Sequence[str]) -> ComposedTree:
        """Compose a tree; Hydra composes those of the same choices once, and the values are set in a copy.

        Raise NotApplied for the overrides that Hydra would refuse.
        """
        values, groups, faults = self._sorted(overrides)
        key = tuple(groups)
        if key not in self._pickled:
            self._pickled[key] = pickle.dumps(self._by_hydra(key))
        composed = cast("ComposedTree", pickle.loads(self._pickled[key]))
        for text, override in values:
            try:
                _apply(override, composed.tree)
            except (HydraException, OmegaConfBaseException) as error:
                faults.append(Fault(text, override, error))
        if faults:
            raise NotApplied(faults)
        OmegaConf.set_struct(composed.tree, False)
        return composed

    def _sorted(self, overrides: Sequence[str]) -> tuple[list[tuple[str, Override]], list[str], list[Fault]]:
        """Separate overrides of values, those that choose files, and words that are no overrides."""
        values, groups, faults = [], [], []
        typed = convert_for_hydra(overrides, self.primary)
        for text, in_grammar in zip_longest(overrides, typed, fillvalue=""):
            try:
                override = _parse(in_grammar)
            except HydraException as error:
                faults.append(Fault(text, None, error))
                continue
            key = override.key_or_group
            if override.is_sweep_override():
                values.append((text, override))
            elif override.is_hydra_override() or override.package is not None:
                groups.append(in_grammar)
            elif isinstance(value := override.value(), dict) or not self._is_group(key):
                values.append((text, override))
            else:
                names = value if isinstance(value, list) and not override.is_delete() else [value]
                is_left_out = override.is_delete() and value is None
                if not is_left_out and not all(isinstance(name, str) for name in names):  # Hydra fails
                    raise NoSuchChoice(key, text.partition("=")[2])
                groups.append(in_grammar)
        return values, groups, faults

    def _is_group(self, key: str) -> bool:
        return self.primary == MAIN and any((root / key).is_dir() for root in self.roots)

    def _by_hydra(self, typed: Sequence[str]) -> ComposedTree:
        try:
            with start_hydra(self.roots):
                tree = hydra.compose(self.primary, list(typed), return_hydra_config=True)
        except RecursionError as error:
            chosen = escape(" ".join(text for text in typed if not text.startswith("~")))
            hint = "a file can build on its own name only if a later tree has a file of that name"
            raise UserError(f"{chosen}: the defaults lists go in circles", hint=hint) from error
        except ValueError as error:  # OmegaConf's, of a name below a list
            raise ConfigKeyError(str(error)) from error
        with open_dict(tree):
            names = tree.pop("hydra").runtime.choices
        choices = {str(group): str(name) for group, name in names.items() if name}
        return ComposedTree(tree, choices, tuple(typed))


@lru_cache(maxsize=1024)
def _parse(text: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def _apply(override: Override, tree: DictConfig) -> None:
    """Change a value of a tree as Hydra would; raise an error of Hydra's or OmegaConf's if it cannot."""
    key = override.key_or_group
    if override.is_sweep_override():
        raise HydraException("a sweep")
    if not override.is_delete():
        try:
            OmegaConf.update(tree, key, override.value(), merge=True, force_add=override.is_force_add())
        except ValueError as error:  # as above
            raise ConfigKeyError(str(error)) from error
        return
    present = OmegaConf.select(tree, key, throw_on_missing=False)
    if present is None or override.value() not in (None, present):
        raise HydraException("nothing to delete, or another value")
    parent, _, name = key.rpartition(".")
    with open_dict(tree):
        del (OmegaConf.select(tree, parent) if parent else tree)[name]


def _check_size(plain: Any) -> None:
    """Raise UserError if plain references make too long a value; a circle is OmegaConf's to find."""
    sizes: dict[KeyPath, int] = {}

    def size_of(key: KeyPath) -> int:
        if key not in sizes:
            sizes[key] = 0
            for path, value in nodes(_at(plain, key), key):
                sizes[key] += 0 if isinstance(value, dict | list) else len(str(value))
                sizes[key] += sum(map(size_of, _targets(path, value)))
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
    for path, value in nodes(_at(plain, key), key):
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


def nodes(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield a node and all below it, each with its path: names of keys, and numbers of a list's items."""
    yield path, node
    if isinstance(node, dict):
        for name, value in node.items():
            yield from nodes(value, (*path, name))
    elif isinstance(node, list | tuple):
        for number, value in enumerate(node):
            yield from nodes(value, (*path, number))
