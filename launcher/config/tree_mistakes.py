"""Mistakes in files of the tree, such as broken references. Imported only after a mistake was found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from launcher.config.overrides import GROUPS, MAIN
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.config.tree_composer import MissingValue
from launcher.errors import UserError, did_you_mean, escape, nearest
from launcher.runs.paths import display_path

_RESOLVERS = ("divide_ceil", "divide_floor", "max_time", "multiply", "oc.decode", "oc.env", "oc.select")


def explain_value(error: OmegaConfBaseException, keys: Sequence[str]) -> UserError:
    """Explain a value that is missing, or a reference to a key that does not exist."""
    key = str(error.full_key or "")
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    start = f"{escape(key)}: " if key else ""
    match = re.search(r"Missing mandatory value: ([\w.]+)", message)
    if match:
        return MissingValue(key if isinstance(error, MissingMandatoryValue) else match[1])
    if isinstance(error, InterpolationKeyError):
        return _no_such_reference(key, message, keys)
    match = re.search(r"Environment variable '([^']+)' (not found|is empty)", message)
    if match:
        state, remedy = ("empty", "give it a value") if match[2] == "is empty" else ("not set", "export it")
        return UserError(
            f"{start}the environment variable {match[1]} is {state}",
            key=key,
            hint=f"{remedy}, or give a default: ${{oc.env:{match[1]},DEFAULT}}",
        )
    match = re.search(r"Unsupported interpolation type (\S+)", message)
    if match:
        hint = did_you_mean(match[1], _RESOLVERS)
        return UserError(f"{start}there is no resolver {match[1]!r}", key=key, hint=hint)
    if "Recursive interpolation" in message:
        return UserError(f"{start}it refers to itself", key=key, hint="give it a value of its own")
    match = re.search(r"node `([^`]*)` is not a container", message)
    if match:
        return UserError(f"{match[1]}: expected keys below it, not a value", key=match[1])
    if "Cannot merge DictConfig with ListConfig" in message:
        return UserError(f"{start}expected a list, such as [a, b]", key=key)
    message = re.sub(r"^(\w+) raised while resolving interpolation: $", r"its resolver ends with \1", message)
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message)
    return UserError(f"{start}{escape(message[:1].lower() + message[1:])}", key=key or None)


def _no_such_reference(key: str, message: str, keys: Sequence[str]) -> UserError:
    start = escape(key)
    match = re.search(r"Interpolation key '([^']*)' not found", message)
    name = match[1] if match else ""
    near = nearest(name, [other for other in keys if other != name])
    hint = f"did you mean '${{{near[0]}}}'?" if near else "whole keys are meant, such as ${cluster.partition}"
    if name.isupper() and "." not in name:
        hint = f"of the environment: ${{oc.env:{name}}}; or let envsubst fill it in before"
    if name.startswith("cluster.") and name.removeprefix("cluster.") in ClusterConfig.model_fields:
        key = "cluster"
        hint = "the files in cluster/ build on what all clusters share: defaults: [_base, _self_]"
    return UserError(f"{start}=${{{name}}}: there is no key {name!r} to refer to", key=key, hint=hint)


_LISTED = 12  # missing keys that one message names


def mistakes_of_root(roots: Sequence[Path]) -> list[UserError]:
    """Return what is wrong with the root file of the user's own tree, if there is one."""
    ours = roots[-1] / f"{MAIN}.yaml"
    path = next((file for root in roots[:-1] if (file := root / f"{MAIN}.yaml").is_file()), None)
    try:
        node = yaml.compose(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError, yaml.YAMLError):  # told by others
        return []
    if path is None or not isinstance(node, yaml.MappingNode):
        return []
    return [*_unknown_groups(path, node, roots), *_unknown_keys(path, node), *_missing(path, node, ours)]


def _unknown_groups(path: Path, node: yaml.MappingNode, roots: Sequence[Path]) -> Iterator[UserError]:
    for name, choice, line in _choices(node):
        known = name in GROUPS or name.startswith("hydra/") or any((root / name).is_dir() for root in roots)
        if known or choice in ("null", "~", ""):
            continue
        near = did_you_mean(name, GROUPS) or ""
        yield UserError(
            f"{escape(name)}={escape(choice)}: there is no such group",
            source=f"from {escape(display_path(path))}:{line}",
            hint=near if near.startswith("did") else f"take the line out; {near}",
        )


def _unknown_keys(path: Path, node: yaml.MappingNode) -> Iterator[UserError]:
    for key, _ in node.value:
        if key.value not in (*RunConfig.model_fields, "defaults", "hydra"):
            near = nearest(key.value, RunConfig.model_fields)
            # The NeMo launcher has training_config for the choice of training.
            is_meant = near and not key.value.endswith("_config")
            yield UserError(
                f"{escape(key.value)}: there is no such key",
                source=f"from {escape(display_path(path))}:{key.start_mark.line + 1}",
                hint=f"did you mean {near[0]!r}?" if is_meant else "take the line out",
            )


def _missing(path: Path, node: yaml.MappingNode, ours: Path) -> Iterator[UserError]:
    present = {key.value for key, _ in node.value} | {name for name, _, _ in _choices(node)}
    needed = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    missing = [name for name in dict.fromkeys((*GROUPS, *needed)) if name not in present]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        yield UserError(
            f"{escape(display_path(path))}: {', '.join(missing[:_LISTED])}{more}: missing",
            hint=f"begin with a copy of {display_path(ours)}, which it replaces",
        )


def _choices(node: yaml.MappingNode) -> Iterator[tuple[str, str, int]]:
    """Return the groups of the defaults list, each with its choice and its line."""
    for key, value in node.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for entry in value.value:
                for group, choice in entry.value if isinstance(entry, yaml.MappingNode) else ():
                    name = group.value.removeprefix("override ").removeprefix("optional ")
                    yield name.partition("@")[0].lstrip("/"), str(choice.value), group.start_mark.line + 1
