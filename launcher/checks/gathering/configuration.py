"""Facts of the configuration alone: keys that are not shipped, GPUs of a node, unexpanded variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from launcher.checks.rules.keys import KEYS
from launcher.checks.rules.resources import gpus_of
from launcher.config.compose import CONF_DIR
from launcher.config.overrides import parse_override
from launcher.config.secrets import values_of
from launcher.config.values import AS_WRITTEN
from launcher.drafting import Draft
from launcher.plan import REFERENCE
from launcher.stages.stage import stage_cluster

_NEMO_NODES = ("trainer", "exp_manager", "model")


def node_gpus(draft: Draft) -> int | None:
    """Return the GPUs of a node in the cluster's configuration; None if not set."""
    config, stage = draft.composition.config, draft.plan.job.stage
    cluster = stage_cluster(config, stage)
    return gpus_of(cluster.gpus_per_node, cluster.gres)


def find_unexpanded(draft: Draft) -> tuple[tuple[str, str], ...]:
    """Return keys with values that contain an unexpanded shell variable, and the values."""
    found: dict[str, str] = {}
    for key, value in values_of(draft.composition.config.model_dump(exclude={"stage_cluster"})):
        if isinstance(value, str) and re.search(REFERENCE, value):
            # Derived values are reported under the original key.
            is_derived = AS_WRITTEN.search(key) or any(other in value for other in found.values())
            if "env_vars." in key or not is_derived:
                found[key] = value
    return tuple(found.items())


def find_added_keys(draft: Draft) -> tuple[str, ...]:
    """Return the keys of NeMo's nodes that the user added to the shipped tree."""
    known, training, job = read_known_keys(draft), draft.composition.config.training, draft.plan.job
    nodes = {name: getattr(training, name) for name in _NEMO_NODES} if known else {}
    if known and training is not None and job.engine == "megatron_lm" and job.config is not None:
        from launcher.stages.megatron_lm import is_translated

        # A key that a check reads is not thereby the engine's.
        config, model_type, known = job.config, training.run.model_type, _shipped_keys()
        return tuple(
            key
            for key in _keys_below(nodes)
            if key not in known and not is_translated(config, model_type, key)
        )
    return tuple(key for key in _keys_below(nodes) if key not in known)


def read_known_keys(draft: Draft) -> frozenset[str]:
    """Return the keys that shipped files have or checks read; empty if the user cannot have added keys."""
    composition = draft.composition
    overrides = map(parse_override, composition.overrides)
    adds = any(item.sign.startswith("+") and item.key.startswith("training.") for item in overrides)
    can_add = composition.config.training is not None and (adds or composition.config_dirs)
    return _shipped_keys() | KEYS if can_add else frozenset()


@cache
def _shipped_keys() -> frozenset[str]:
    """Return the keys of the shipped files of all families: they build on each other."""
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
        for entry in content.get("defaults", ()):
            # A file included below one of NeMo's nodes, such as ``/training/t5/_stack@model.encoder``.
            name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
            if package.startswith(tuple(f"{node}." for node in _NEMO_NODES)):
                keys.update((package, *_keys_below(files[name], f"{package}.")))
    return frozenset(keys)


def _keys_below(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in node.items():
        yield f"{prefix}{name}"
        if isinstance(child, Mapping):
            yield from _keys_below(child, f"{prefix}{name}.")
