"""The source of a value: the override that set it, or the file and line.

Asked after a mistake was found, and by `slipway show`, so it may take its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from launcher.config.hydra_setup import find_file, start_hydra
from launcher.config.overrides import (
    GROUPS,
    MAIN,
    NODE_GPUS,
    Override,
    is_derived_from_gpus,
    keys_for_hydra,
    parse_override,
    skipped_groups,
)
from launcher.errors import UserError, escape, shortened
from launcher.runs.paths import display_path
from launcher.secrecy import MASK, redacted, secrets_of

# Errors to ignore when locating a value in a tree that has mistakes.
_SOURCE_UNKNOWN = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    ValueError,
    RecursionError,
    UserError,
)

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_REFERENCES_FOLLOWED = 5


class TreeFile(NamedTuple):
    """A file that a composition reads, and the node that its keys are below."""

    path: Path
    package: str


class Position(NamedTuple):
    """The line of a file that sets a key, and the value if it is a scalar."""

    file: TreeFile
    line: int
    value: str | None


def _mask_secrets(message: str, overrides: Sequence[str]) -> str:
    """Mask the values of secrets in a message that quotes overrides, whole or in part."""
    for text in overrides:
        message = message.replace(escape(text), escape(redacted(text)))
    secrets = [escape(secret) for text in overrides for secret in secrets_of(text)]
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, MASK)
    return message


class Sources:
    """The sources of the values of one composition; each file is read once.

    `like` are those of a composition with the same choices, and save reading the files again.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        roots: Sequence[Path],
        like: Sources | None = None,
        primary: str = MAIN,
    ) -> None:
        self._texts, self._roots, self._like, self._primary = overrides, roots, like, primary
        self._nodes: dict[Path, yaml.Node | None] = like._nodes if like else {}

    def annotate(self, error: UserError) -> None:
        """Fill in the sources of the values that an error is about, and mask secrets."""
        for mistake in error.mistakes:
            if mistake.source is None and mistake.key is not None:
                lines = [self.locate(mistake.key)]
                lines += [(source := self.locate(key)) and f"{key} is {source}" for key in mistake.also]
                mistake.source = "\n".join(filter(None, lines)) or None
        for mistake in {error, *error.mistakes}:
            for part in ("message", "source", "hint"):
                text = getattr(mistake, part)
                setattr(mistake, part, text and _mask_secrets(text, self._texts))

    def locate(self, key: str, depth: int = _REFERENCES_FOLLOWED) -> str | None:
        """Return ``from the command line: ...``, ``from FILE:LINE``, or ``None`` if nothing sets the key."""
        with suppress(*_SOURCE_UNKNOWN):
            setting = self._setting(NODE_GPUS if is_derived_from_gpus(key, self._overrides) else key)
            if isinstance(setting, Override):
                return f"from the command line: {shortened(escape(redacted(setting.text)))}"
            reference = _reference_in(setting)
            further = self.locate(reference, depth - 1) if reference is not None and depth else None
            return further or (setting and f"from {display_path(setting.file.path)}:{setting.line}")
        return None

    @cached_property
    def _overrides(self) -> list[Override]:
        return [parse_override(text) for text in self._texts]

    @cached_property
    def files(self) -> list[TreeFile]:
        """The files that the composition reads, in the order in which they are merged."""
        return self._like.files if self._like else files_of(self._overrides, self._roots, self._primary)

    def first(self, key: str) -> Position | None:
        """Return the place that states a key first, which the other files build on."""
        return next(self._positions(key, self.files), None)

    def written(self, key: str, depth: int = _REFERENCES_FOLLOWED) -> str | None:
        """Return a value as it was written, before it was parsed; ``None`` if that is unclear.

        A value that is only a reference is the value of that key, unless `depth` is 0.
        """
        with suppress(*_SOURCE_UNKNOWN):
            setting = self._setting(key)
            reference = _reference_in(setting)
            if reference is None:
                return _value_of(setting, key)
            return self.written(reference, depth - 1) if depth else None
        return None

    def _setting(self, key: str) -> Override | Position | None:
        """Return the override that sets a key, or else the place in the last file that does."""
        override = _setting_override(key, self._overrides)
        return override or next(self._positions(key, reversed(self.files)), None)

    def _positions(self, key: str, files: Iterable[TreeFile]) -> Iterator[Position]:
        positions = (_position(self._node(file), file, key) for file in files)
        return (position for position in positions if position is not None)

    def _node(self, file: TreeFile) -> yaml.Node | None:
        if file.path not in self._nodes:
            self._nodes[file.path] = yaml.compose(file.path.read_text(encoding="utf-8"))
        return self._nodes[file.path]


def _reference_in(setting: Override | Position | None) -> str | None:
    """Return the key that a whole value in a file refers to."""
    match = _REFERENCE.fullmatch(setting.value or "") if isinstance(setting, Position) else None
    return match[1] if match else None


def _value_of(setting: Override | Position | None, key: str) -> str | None:
    if isinstance(setting, Override) and setting.key != key:
        return None  # a part of a mapping
    return setting.value if setting is not None else None


def locate_text(config_path: str, text: str, roots: Sequence[Path]) -> str | None:
    """Return the file of the tree that holds a text, and the first such line."""
    path = find_file(config_path, roots)
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if text in line), None)
    return f"from {display_path(path)}:{number}" if number else f"from {display_path(path)}"


def _setting_override(key: str, overrides: Sequence[Override]) -> Override | None:
    for override in reversed(overrides):
        below = key.removeprefix(f"{override.key}.").split(".") if key != override.key else []
        if below and not key.startswith(f"{override.key}."):
            continue
        if below and override.is_choice:
            continue  # the chosen file set it
        if below and (override.value or "").startswith("{") and not _holds(override, below):
            continue
        return override
    return None


def _holds(override: Override, below: Sequence[str]) -> bool:
    """Return True if the mapping that an override sets has a value there."""
    value = OverridesParser.create().parse_override(f"x={override.value}").value()
    for name in below:
        if not isinstance(value, dict):
            return True
        if name not in value:
            return False
        value = value[name]
    return True


def files_of(overrides: Sequence[Override], roots: Sequence[Path], primary: str = MAIN) -> list[TreeFile]:
    """Return the files that a composition of `primary` reads, in the order in which they are merged."""
    chosen = keys_for_hydra(
        [override for override in overrides if override.is_choice or override.key in GROUPS]
    )
    if primary == MAIN:
        chosen += [f"~{group}" for group in skipped_groups(overrides)]
    with start_hydra(roots) as loader:
        defaults = loader.compute_defaults_list(primary, chosen, RunMode.RUN).defaults
    files = ((find_file(default.config_path, roots), default.package or "") for default in defaults)
    return [TreeFile(path, package) for path, package in files if path is not None]


def _position(node: yaml.Node | None, file: TreeFile, key: str) -> Position | None:
    below = key if not file.package else key.removeprefix(f"{file.package}.")
    if file.package and below == key:
        return None
    line = 0
    for name in below.split("."):
        if isinstance(node, yaml.MappingNode):
            entries = [entry for entry in node.value if entry[0].value == name]
        elif isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
            entries = [(node.value[int(name)], node.value[int(name)])]
        else:
            # A parent that was set to a value, such as null, decided this key too.
            return Position(file, line, None) if line and isinstance(node, yaml.ScalarNode) else None
        if not entries:
            return None
        name_node, node = entries[-1]
        line = name_node.start_mark.line + 1
    return Position(file, line, node.value if isinstance(node, yaml.ScalarNode) else None)
