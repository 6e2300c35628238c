"""The files of conf/, parsed and composed once a process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

from launcher.config import compose, mistakes
from launcher.config.tree_composer import TreeComposer, tree_composer

_COMPOSING = (compose, mistakes)


def compose_shipped_files_once() -> TreeComposer:
    """Have each choice of shipped files composed once, as for a sweep; return what composes them.

    Nothing changes the files; those elsewhere are read each time.
    """
    _parse_once()
    kept = TreeComposer((compose.CONF_DIR,))

    def kept_or_anew(roots: tuple[Path, ...], *arguments: Any, **options: Any) -> TreeComposer:
        return kept if roots == (compose.CONF_DIR,) else tree_composer(roots, *arguments, **options)

    for module in _COMPOSING:
        module.tree_composer = kept_or_anew  # type: ignore[attr-defined]
    return kept


def compose_anew(patch: pytest.MonkeyPatch) -> None:
    """Compose each time from the beginning again, as one launch does."""
    for module in _COMPOSING:
        patch.setattr(module, "tree_composer", tree_composer)


def _parse_once() -> None:
    """Have Hydra parse each shipped file, with its defaults, once."""
    repository: Any = ConfigRepository
    load, shipped = repository.load_config, str(compose.CONF_DIR)
    parsed: dict[str, bytes] = {}

    def load_config(self: Any, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if getattr(source, "path", None) != shipped:
            return load(self, config_path)
        key = f"{source.provider} {config_path}"
        if key not in parsed:
            parsed[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(parsed[key])

    repository.load_config = load_config
