"""Completions of an override for the shell: quick, so without Hydra.

The keys are those of the files that the choices so far lead to. What cannot be read has no candidates: the
launch says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.config.choices import options_of
from launcher.config.overrides import GROUPS, STAGES, parse_override

Tree = dict[str, Any]

_DEPTH = 10  # files that build on each other


def candidates(word: str, others: Sequence[str], roots: Sequence[Path]) -> list[str]:
    """Return the words that begin with `word`: choices after ``GROUP=``, else keys, one level at a time.

    A key that has keys below it ends with a dot, one that takes a value with ``=``.

    Parameters
    ----------
    others
        The other words of the command line, whose choices count.
    roots
        The trees, the one that is looked at first coming first.
    """
    found = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(=?)(.*)", word, re.DOTALL)
    assert found is not None
    sign, key, equals, value = found[1] or "", found[2], found[3], found[4]
    if equals:
        return [f"{sign}{key}={option}" for option in _values(key, roots) if option.startswith(value)]
    return [f"{sign}{name}" for name in _keys(key, others, roots, "" if sign == "~" else "=")]


def _values(key: str, roots: Sequence[Path]) -> list[str]:
    if key == "stages":
        return [f"[{stage}]" for stage in STAGES]
    return options_of(key, roots) if key in GROUPS else []


def _keys(start: str, others: Sequence[str], roots: Sequence[Path], ending: str) -> list[str]:
    *parents, begun = start.split(".")
    node: Any = _composed(others, roots)
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return []
    above = "".join(f"{parent}." for parent in parents)
    names = [str(name) for name in node if str(name).startswith(begun)]
    inner = [f"{above}{name}." for name in names if isinstance(node[name], dict)]
    # A group is chosen as a whole too.
    leaves = [f"{above}{name}{ending}" for name in names if not isinstance(node[name], dict)]
    choices = [f"{name}{ending}" for name in names if not parents and name in GROUPS]
    return sorted({*inner, *leaves, *choices})


def _composed(others: Sequence[str], roots: Sequence[Path]) -> Tree:
    """Return the tree that the words so far select; its values are not resolved."""
    chosen = {item.key: item.value for item in map(parse_override, others) if item.is_choice}
    root = _read("config", roots)
    for default in root.pop("defaults", []):
        for group, choice in default.items() if isinstance(default, dict) else ():
            _merge(root, {group: _file(f"{group}/{chosen.get(group) or choice}", roots, _DEPTH)})
    return root


def _file(name: str, roots: Sequence[Path], depth: int) -> Tree:
    """Merge a file of a group into those that it builds on."""
    content = _read(name, roots)
    merged: Tree = {}
    for default in content.pop("defaults", []):
        if isinstance(default, str) and default != "_self_" and depth:
            path, _, package = default.partition("@")
            below = _file(
                path[1:] if path[0] == "/" else f"{name.rpartition('/')[0]}/{path}", roots, depth - 1
            )
            for part in reversed([] if package in ("", "_here_") else package.split(".")):
                below = {part: below}
            _merge(merged, below)
    _merge(merged, content)
    return merged


def _read(name: str, roots: Sequence[Path]) -> Tree:
    import yaml

    path = next((file for root in roots if (file := root / f"{name}.yaml").is_file()), None)
    if path is None:
        return {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _merge(target: Tree, source: Tree) -> None:
    for name, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value


def recipes(roots: Sequence[Path]) -> list[str]:
    """Return the names of the images that can be built."""
    files = (file for root in roots for file in sorted(root.glob("image/*.yaml")))
    return list(dict.fromkeys(file.stem for file in files if not file.stem.startswith("_")))


def images(store: Path) -> list[str]:
    """Return the images in a directory."""
    return sorted(file.name for file in store.glob("[!.]*.sqsh"))


def runs(base: Path) -> Iterator[str]:
    """Return the names of the runs below a directory, then of those in known trees, each once."""
    from launcher.runs.index import Index
    from launcher.runs.paths import find_runs

    seen: set[str] = set()
    for tree in (base, *Index().trees()):
        with contextlib.suppress(OSError):
            seen.update(names := [run.name for run in find_runs(tree) if run.name not in seen])
            yield from names
