"""Keys of NeMo's nodes that no shipped configuration has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.checks.rules.types import KEYS
from launcher.config.compose import CONF_DIR
from launcher.config.overrides import parse_override
from launcher.drafting import Draft

_NEMO_NODES = ("trainer", "exp_manager", "model")


def added_keys(made: Draft) -> tuple[tuple[str, ...], frozenset[str]]:
    """The keys of NeMo's nodes that the user added to the shipped tree, and those that are known.

    Nothing is read where nothing can have been added.
    """
    training, composition = made.composition.config.training, made.composition
    signs = (parse_override(text) for text in composition.overrides)
    adds = any(item.sign.startswith("+") and item.key.startswith("training.") for item in signs)
    if training is None or not (adds or composition.config_dir):
        return (), frozenset()
    shipped = _shipped_keys() | KEYS
    nodes = {name: getattr(training, name) for name in _NEMO_NODES}
    return tuple(key for key in _keys_below(nodes) if key not in shipped), shipped


def _shipped_keys() -> frozenset[str]:
    """The keys that the shipped files have, of all families: they build on each other."""
    # Imported late: most launches add no key.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    keys: set[str] = set()
    files = {
        f"/{path.relative_to(CONF_DIR).with_suffix('')}": yaml.load(path.read_text(encoding="utf-8"), loader)
        for path in (CONF_DIR / "training").rglob("*.yaml")
    }
    for content in files.values():
        if not isinstance(content, dict):
            continue
        keys.update(_keys_below({name: content[name] for name in _NEMO_NODES if name in content}))
        for name, package in _packaged(content):
            keys.update((package, *_keys_below(files[name], f"{package}.")))
    return frozenset(keys)


def _packaged(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Files that a file takes in below one of NeMo's nodes, such as ``/training/t5/_stack@model.encoder``."""
    for entry in content.get("defaults", ()):
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        if package.startswith(tuple(f"{node}." for node in _NEMO_NODES)):
            yield name, package


def _keys_below(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in node.items():
        yield f"{prefix}{name}"
        if isinstance(child, Mapping):
            yield from _keys_below(child, f"{prefix}{name}.")
