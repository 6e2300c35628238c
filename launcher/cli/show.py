"""`slipway show`: the composed configuration, each value with its source."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from launcher.cli.options import Verbs, add_config_dir, add_option, add_overrides, add_verb
from launcher.config.compose import Composition, compose, tree_roots
from launcher.config.sources import Sources
from launcher.config.tree_composer import MissingValue
from launcher.errors import Mistakes, UserError, escape, nearest
from launcher.runs.paths import display_path
from launcher.secrecy import MASK, hidden
from launcher.ui.tables import Line, print_styled
from launcher.ui.terminal import print_json

_HELP = """\
Compose and validate the configuration, and print each value with its source: the file and line, or the
override, that set it.

examples:
  slipway show training=gpt3/126m cluster=bcm                     the whole tree
  slipway show training=gpt3/126m training.model.optim cluster    two nodes of it
  slipway show training=gpt3/5b training.trainer.num_nodes=4 training.trainer
  slipway show --json | jq -r '.[] | select(.source | test("5b")) | .key'

A word without = names a node or a key; the others are overrides. The output is YAML with comments.

exit code:
  0  printed
  2  a mistake in the command line or the configuration
"""

# The column of the comments, if the value is short enough.
_COLUMN = 44


# A value of the tree with its path, and the file and line, or the override, that set it, if known.
Leaf = tuple[tuple[str, ...], Any, str | None]


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "show", run, text=_HELP)
    add_overrides(parser, "such as training=gpt3/126m, or training.model", "OVERRIDE|KEY")
    add_option(parser, "--json", "print a list of {key, value, source}")
    add_option(parser, "--plain", "print without colours, also on a terminal")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> None:
    overrides = [word for word in args.overrides if _is_override(word)]
    keys = [word.strip(".") for word in args.overrides if not _is_override(word)]
    composition, missing = _compose(overrides, args.config_dirs)
    # Without the nodes of stages that were not requested.
    tree = composition.config.model_dump(exclude_unset=True)
    leaves: Iterable[Leaf] = _leaves(_narrow(tree, keys), composition.sources(), composition.references)
    leaves = (missing.get(path, (path, value, source)) for path, value, source in leaves)
    if args.json:
        items = [{"key": ".".join(path), "value": value, "source": source} for path, value, source in leaves]
        print_json(items)
        return
    if args.config_dirs:
        trees = ", ".join(map(display_path, tree_roots(args.config_dirs)))
        print(f"# trees (earlier ones win): {escape(trees)}")
    if args.plain:
        print("\n".join("".join(text for text, _ in line) for line in _lines(leaves)))
    else:
        print_styled(_lines(leaves))


def _compose(
    overrides: Sequence[str], config_dirs: tuple[Path, ...]
) -> tuple[Composition, dict[tuple[str, ...], Leaf]]:
    """Compose the tree, and return the leaves of lists that only a launch needs where they have no value."""
    try:
        return compose(overrides, config_dirs), {}
    except UserError as error:
        sources = {str(item.key): (item.source or "").removeprefix("from ") for item in error.mistakes}
        if all(isinstance(mistake, MissingValue) for mistake in error.mistakes):
            with suppress(UserError):  # one that is no list
                filled = compose([*overrides, *(f"{key}=[_]" for key in sources)], config_dirs)
                return filled, {
                    (path := tuple(key.split("."))): (path, "???", sources[key]) for key in sources
                }
        raise


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("+", "~"))


def _narrow(tree: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the tree with the requested nodes only, each below its parents."""
    if not keys:
        return tree
    narrowed: dict[str, Any] = {}
    mistakes: list[UserError] = []
    for key in keys:
        *parents, last = key.split(".")
        try:
            node, target = tree, narrowed
            for depth, name in enumerate(parents):
                node = _child(node, name, key, parents[:depth], tree)
                target = target.setdefault(name, {})
            target[last] = _child(node, last, key, parents, tree)
        except UserError as error:
            mistakes.append(error)
    if mistakes:
        raise Mistakes(mistakes)
    return narrowed


def _child(node: Any, name: str, key: str, parents: Sequence[str], tree: dict[str, Any]) -> Any:
    if isinstance(node, dict) and name in node:
        return node[name]
    siblings, above = node if isinstance(node, dict) else {}, ".".join(parents)
    near = [other for other in _keys(tree) if other.endswith(f".{key}")][:3]
    near = near or [f"{above}.{match}".lstrip(".") for match in nearest(name, siblings)]
    hint = f"slipway show ... {above} shows those that are there, +{key}=VALUE adds it"
    hint = hint if parents else f"valid: {', '.join(tree)}"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else escape(hint)
    raise UserError(f"{escape(key) or repr(key)}: there is no such key", hint=hint)


def _keys(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def _leaves(
    node: dict[str, Any], sources: Sources, references: Collection[str], above: tuple[str, ...] = ()
) -> Iterator[Leaf]:
    for name, value in node.items():
        path = (*above, str(name))
        if isinstance(value, dict) and value:
            yield from _leaves(value, sources, references, path)
            continue
        key = ".".join(path)
        source = sources.locate(key)
        # In a list the reference is an element.
        is_reference = any(f"{reference}.".startswith(f"{key}.") for reference in references)
        shown = MASK if is_reference else hidden(key, value)
        yield path, shown, source.removeprefix("from ") if source else None


def _lines(leaves: Iterable[Leaf]) -> Iterator[Line]:
    """Yield the lines of YAML: the new parents, then the value and its comment."""
    before: list[str] = []
    for (*parents, key), content, source in leaves:
        is_new = False
        for depth, parent in enumerate(parents):
            is_new = is_new or before[depth : depth + 1] != [parent]
            if is_new:
                yield (("  " * depth, ""), (f"{_yaml(parent)}:", "bold"))
        name, value = f"{'  ' * len(parents)}{_yaml(key)}", _yaml(content)
        room = " " * max(2, _COLUMN - len(name) - len(value) - 2)
        comment = f"{room}# from {source}" if source else ""
        yield ((f"{name}:", ""), (f" {value}", "cyan"), (comment, "dim"))
        before = parents


def _yaml(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")
