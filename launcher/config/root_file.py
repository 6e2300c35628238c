"""A `config.yaml` of the user's own, such as the NeMo launcher's, held against the one that it replaces.

Imported only after a mistake was found: Hydra names one group of it at a time, and not its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from launcher.config.overrides import GROUPS, MAIN
from launcher.config.schema import RunConfig
from launcher.config.sources import relative
from launcher.errors import UserError, did_you_mean, one_line

_LISTED = 12  # missing keys that one message names


def mistakes_of_root(roots: Sequence[Path]) -> list[UserError]:
    """Return what is wrong with the root file of the user's own tree, if there is one.

    Parameters
    ----------
    roots
        The trees, the one that is looked at first coming first; the last is ours.
    """
    ours = roots[-1] / f"{MAIN}.yaml"
    path = next((file for root in roots[:-1] if (file := root / f"{MAIN}.yaml").is_file()), None)
    node = _mapping(path) if path is not None else None
    if path is None or node is None:
        return []
    return [*_unknown_groups(path, node, roots), *_unknown_keys(path, node), *_missing(path, node, ours)]


def _mapping(path: Path) -> yaml.MappingNode | None:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # told by others
        return None
    return node if isinstance(node, yaml.MappingNode) else None


def _unknown_groups(path: Path, node: yaml.MappingNode, roots: Sequence[Path]) -> Iterator[UserError]:
    for name, choice, line in _choices(node):
        known = name in GROUPS or name.startswith("hydra/") or any((root / name).is_dir() for root in roots)
        if known or choice in ("null", "~", ""):
            continue
        near = did_you_mean(name, GROUPS) or ""
        yield UserError(
            f"{one_line(name)}={one_line(choice)}: there is no such group",
            source=f"from {one_line(relative(path))}:{line}",
            hint=near if near.startswith("did") else f"take the line out; {near}",
        )


def _unknown_keys(path: Path, node: yaml.MappingNode) -> Iterator[UserError]:
    for key, _ in node.value:
        if key.value not in (*RunConfig.model_fields, "defaults", "hydra"):
            yield UserError(
                f"{one_line(key.value)}: there is no such key",
                source=f"from {one_line(relative(path))}:{key.start_mark.line + 1}",
                hint=_near(key.value),
            )


def _near(name: str) -> str:
    near = did_you_mean(name, RunConfig.model_fields) or ""
    # The NeMo launcher has training_config for the choice of training.
    return near if near.startswith("did") and not name.endswith("_config") else "take the line out"


def _missing(path: Path, node: yaml.MappingNode, ours: Path) -> Iterator[UserError]:
    present = {key.value for key, _ in node.value} | {name for name, _, _ in _choices(node)}
    needed = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    missing = [name for name in (*GROUPS, *needed) if name not in present]
    missing = list(dict.fromkeys(missing))
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        yield UserError(
            f"{one_line(relative(path))}: {', '.join(missing[:_LISTED])}{more}: missing",
            hint=f"begin with a copy of {relative(ours)}, which it replaces",
        )


def _choices(node: yaml.MappingNode) -> Iterator[tuple[str, str, int]]:
    """Return the groups of the defaults list, each with its choice and its line."""
    for key, value in node.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for entry in value.value:
                for group, choice in entry.value if isinstance(entry, yaml.MappingNode) else ():
                    name = group.value.removeprefix("override ").removeprefix("optional ")
                    yield name.partition("@")[0].lstrip("/"), str(choice.value), group.start_mark.line + 1
