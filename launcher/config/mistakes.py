"""Hydra's errors about the user's overrides, made helpful. Imported only after a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.errors import OverrideParseException as ParseError
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.overrides import (
    GROUPS,
    MAIN,
    NoSuchChoice,
    Override,
    choice_hint,
    for_shell,
    hydra_value,
    keys_for_hydra,
    nearest_choice,
    options_of,
    parse_override,
)
from launcher.config.secrets import NEMO_NODES, Placeholder, placeholder_in
from launcher.config.sources import locate_text
from launcher.config.tree_composer import HydraTree, NeedsFullCompose, tree_composer
from launcher.config.tree_mistakes import MissingValue, broken_trees, explain_value, mistakes_of_root
from launcher.errors import Mistakes, UserError, did_you_mean, escape, nearest
from launcher.slurm.sbatch_options import key_hint

_OPEN = ("image.versions",)  # what a template of the user's own may build
# Mappings that a site fills with its own figures, which have shapes of their own.
_SITES = ("estimates.attained", "cluster.gpu_types")

# What Hydra's grammar takes for a key, or for a group.
_KEY = re.compile(r"[A-Za-z_$][\w$-]*([./]([A-Za-z_$][\w$-]*|\d+))*", re.ASCII)

_MOST_NEAR = 3
_MOST_TRIED = 8  # compositions that look for further mistakes


@dataclass(frozen=True)
class Attempt:
    """A composition that failed; `check` composes other overrides, and holds them against the schema."""

    overrides: Sequence[str]
    roots: Sequence[Path]
    check: Callable[[Sequence[str]], object]
    primary: str = MAIN

    @cached_property
    def tree(self) -> DictConfig | None:
        """The tree of the choices alone, to look up the existing keys in."""
        parsed = map(parse_override, self.overrides)
        choices = [item.text for item in parsed if item.key == "stages" or (item.is_choice and not item.sign)]
        try:
            if self.primary == MAIN:
                with suppress(NeedsFullCompose):
                    return tree_composer(tuple(self.roots)).compose(choices).tree
            return HydraTree(choices, self.roots, self.primary).tree
        except (HydraException, OmegaConfBaseException, UserError):
            return None

    @cached_property
    def keys(self) -> list[str]:
        """All keys of the tree, each with its parents."""
        if self.tree is None:
            return []
        plain = OmegaConf.to_container(self.tree, resolve=False)
        return list(_keys_of(plain)) if isinstance(plain, dict) else []

    def override_of(self, key: str) -> str:
        """Return the override that sets a key, as the user wrote it, or else the key."""
        return next((text for text in reversed(self.overrides) if parse_override(text).key == key), key)

    def no_choice(self, group: str, choice: str) -> NoSuchChoice:
        """Return the error about a choice that its group does not have, with those that it has."""
        return NoSuchChoice(group, choice, choice_hint(choice, options_of(group, self.roots)))

    def as_written(self, typed: str) -> str:
        """Return the override that became `typed` for Hydra: text is quoted on the way."""
        written = (text for text in self.overrides if keys_for_hydra([parse_override(text)]) == [typed])
        return next(written, typed)


def _keys_of(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in mapping.items():
        yield f"{prefix}{name!s}"
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{name!s}.")


def explain_all(error: Exception, attempt: Attempt) -> UserError | None:
    """Say what all mistakes of a command line are; ``None`` if there was none, but a mistake of ours.

    Hydra stops at the first override that it cannot apply. The composition is tried again without it, for as
    long as there are others.
    """
    first = last = explain(error, attempt)
    if first is None or last is None:
        return None
    mistakes, left = list(first.mistakes), list(attempt.overrides)
    for _ in range(_MOST_TRIED):
        if (rest := _without_fault(last, left, attempt)) == left:
            break
        left = rest
        try:
            attempt.check(left)
            break
        except Exception as another:
            last = explain(another, replace(attempt, overrides=left))
        if last is None:
            break
        # A value that was taken away is not missing, and one that was put in its place is not the user's.
        ours = {mistake.key for mistake in mistakes}
        mistakes += [mistake for mistake in last.mistakes if mistake.key not in ours]
    return first if len(mistakes) == len(first.mistakes) else Mistakes(_in_order(mistakes, attempt.overrides))


def _without_fault(error: UserError, overrides: Sequence[str], attempt: Attempt) -> list[str]:
    """Remove the overrides that an error is about, if it is about any."""
    keys = {mistake.key for mistake in error.mistakes if mistake.key}
    if "stages" in keys:  # they decide which keys there are
        return list(overrides)
    rest = []
    for text in overrides:
        item = parse_override(text)
        if not any(_sets(item, key) for key in keys):
            rest.append(text)
        elif item.key in GROUPS and item.value is not None:
            near = nearest_choice(item.value, options_of(item.key, attempt.roots))
            rest += [f"{item.key}={near}"] if near and near != item.value else []
    return [*rest, *(f"++{item.key}=0" for item in error.mistakes if isinstance(item, MissingValue))]


def _sets(override: Override, key: str) -> bool:
    return override.key == key or (not override.is_choice and key.startswith(f"{override.key}."))


def _in_order(mistakes: Sequence[UserError], overrides: Sequence[str]) -> list[UserError]:
    """Sort mistakes in the order of the command line; those of files come last."""
    items = [parse_override(text) for text in overrides]

    def position(mistake: UserError) -> int:
        places = [place for place, item in enumerate(items) if mistake.key and _sets(item, mistake.key)]
        return places[-1] if places else len(items)

    return sorted(mistakes, key=position)


def explain(error: Exception, attempt: Attempt) -> UserError | None:
    """Say what the user's mistake was; ``None`` if it was not one, but a mistake of ours."""
    of_root = mistakes_of_root(attempt.roots) if attempt.primary == MAIN else []
    if of_root:
        return Mistakes(of_root)
    if isinstance(error, NoSuchChoice):
        return attempt.no_choice(error.group, error.choice)
    if isinstance(error, UserError):
        return error
    if isinstance(error, MissingConfigException):
        return _missing_file(error, attempt)
    broken = broken_trees(error, attempt.overrides, attempt.roots, attempt.primary)
    if broken is not None:
        return broken
    if isinstance(error, ParseError):
        return _not_parsed(attempt.as_written(error.override))
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        return _composition(error, attempt) or explain_value(error.__cause__, attempt.keys)
    if isinstance(error, OmegaConfBaseException):
        return explain_value(error, attempt.keys)
    if isinstance(error, HydraException):
        first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _composition(error, attempt) or UserError(escape(first), hint=" ".join(rest[:2]) or None)
    return None


def _missing_file(error: MissingConfigException, attempt: Attempt) -> UserError:
    name = error.missing_cfg_file or ""
    parsed = [parse_override(text) for text in attempt.overrides]
    group = next((item.key for item in parsed if name.startswith(f"{item.key}/")), name.partition("/")[0])
    parent = re.match(r"In '([^']+)'", str(error))
    is_requested = any(name == f"{item.key}/{item.value}" for item in parsed)
    choice = name.removeprefix(f"{group}/")
    if is_requested or parent is None or parent[1] == "config" or group == name:
        return attempt.no_choice(group, choice)
    options = options_of(group, attempt.roots)
    near = nearest_choice(choice, options) or ""
    return UserError(
        f"{escape(name)}: there is no such file to build on",
        source=locate_text(parent[1], name.rpartition("/")[2], attempt.roots),
        # A family's file is built on by its whole path.
        hint=f"did you mean '/{group}/{near}@_here_'?" if "/" in near else choice_hint(choice, options),
    )


def _not_parsed(text: str) -> UserError:
    """Explain an override that is not in Hydra's grammar."""
    override = parse_override(text)
    if not _KEY.fullmatch(override.key) or override.value is None:
        return UserError(f"{escape(text)}: not a key", key=override.key, hint="keys are like cluster.mem")
    value = override.value
    placeholder = placeholder_in(override.key, value)
    if placeholder is not None:
        return Placeholder(override.key, value, placeholder)
    hint: str | None = _quoted(override.key, value)
    if not value.isprintable():
        what, hint = "a line break or another control character needs quotes around the value", None
    elif value.startswith(("'", '"')) and (len(value) == 1 or value[-1] != value[0]):
        what = "a quote is not closed"
    elif value.count("${") > value.count("}"):
        what = "an interpolation is not closed"
    elif value.startswith(("[", "{")):
        what, hint = "Hydra cannot read this", "a list is [a, b], a mapping {key: value}"
    else:
        what = "a character in this value means something else to Hydra"
    return UserError(f"{escape(text)}: {what}", key=override.key, hint=hint)


def _quoted(key: str, value: str) -> str:
    text = value.strip("'\"") if value.startswith(("'", '"')) else value
    return f"if it is text, quote it twice: {for_shell(f'{key}={hydra_value(text)}')}"


def _composition(error: Exception, attempt: Attempt) -> UserError | None:
    """Explain an error of applying overrides, by the beginning of Hydra's message."""
    message = str(error)
    for pattern, handler in _TOLD:
        match = re.match(pattern, message, re.DOTALL)
        if match:
            return handler(match[1], attempt)
    return None


def _unknown_key(key: str, attempt: Attempt) -> UserError:
    tree = attempt.tree
    if any(f"{key}.".startswith(f"{site}.") for site in _SITES):
        text = attempt.override_of(key)
        added = f"+{key}={parse_override(text).value or '...'}"
        message = f"{escape(text)}: not all of it is there yet, and what is new is added with +"
        return UserError(message, key=key, hint=f"to add it: {for_shell(added) if ' ' in added else added}")
    within = _unknown_within(key, attempt) if tree is not None and key in attempt.keys else []
    if within:
        return Mistakes([_no_such_key(f"{inner}: there is no such key", inner, attempt) for inner in within])
    return _no_such_key(f"{escape(attempt.override_of(key))}: there is no such key", key, attempt)


def _unknown_within(key: str, attempt: Attempt) -> list[str]:
    """Return the keys of a mapping on the command line that the tree does not have."""
    value = parse_override(attempt.override_of(key)).value or ""
    try:
        mapping = OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException:
        return []
    below = _keys_of(mapping, f"{key}.") if isinstance(mapping, dict) else []
    unknown = [inner for inner in below if inner not in attempt.keys]
    # Of a key that is not there, those below it are none either.
    return [inner for inner in unknown if inner.rpartition(".")[0] not in unknown]


def _no_such_key(start: str, key: str, attempt: Attempt) -> UserError:
    parent, _, name = key.rpartition(".")
    tree = attempt.tree
    if tree is None:
        return UserError(start, key=key)
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig):
        hint = f"{parent} is not there, or holds no keys"
        # As NeMo's documentation and the notes of a stage name it.
        if f"training.{key}" in attempt.keys:
            hint = f"did you mean 'training.{key}'?"
        if key.startswith("image.") and attempt.primary == MAIN:
            hint = f"keys of a recipe go to `slipway image build NAME {escape(attempt.override_of(key))}`"
        return UserError(start, key=key, hint=hint)
    return UserError(start, key=key, hint=_near_keys(parent, name, [str(child) for child in node], attempt))


def _near_keys(parent: str, name: str, valid: Sequence[str], attempt: Attempt) -> str:
    if parent == "cluster" and (option := key_hint(name)):
        return option
    hint = did_you_mean(name, valid) or "it holds no keys yet"
    # Of the same name, and of a longer one: of nodes training.trainer.num_nodes too.
    elsewhere = [key for end in (f".{name}", f"_{name}") for key in attempt.keys if key.endswith(end)]
    elsewhere = elsewhere[:_MOST_NEAR]
    if elsewhere and not nearest(name, valid):
        hint = f"did you mean {' or '.join(map(repr, elsewhere))}?"
    # NeMo's own nodes may be given keys that our tree does not show.
    if parent.startswith(NEMO_NODES) or parent in _OPEN:
        hint += f"\nto add it all the same: +{parent}.{name}=..."
    return hint


def _nothing_to_delete(key: str, attempt: Attempt) -> UserError:
    if key in attempt.keys:
        return UserError(f"~{escape(key)}: it is null already", key=key, hint="there is nothing to drop")
    hint = did_you_mean(key, nearest(key, attempt.keys, _MOST_NEAR))
    return UserError(f"~{escape(key)}: there is no such key", key=key, hint=hint)


def _several_values(text: str, attempt: Attempt) -> UserError:
    override = parse_override(text)
    if override.key in GROUPS:
        return attempt.no_choice(override.key, override.value or "")
    value = override.value or ""
    return UserError(
        f"{escape(text)}: several values for one key",
        key=override.key,
        hint=f"a list: {for_shell(f'{override.key}=[{value}]')}\n{_quoted(override.key, value)}",
    )


def _sweep(text: str, attempt: Attempt) -> UserError:
    key = parse_override(text).key
    return UserError(f"{escape(text)}: sweeps are not supported: one launch has one value", key=key)


def _deleted_with_another_value(key: str, attempt: Attempt) -> UserError:
    text = attempt.override_of(key)
    hint = f"to drop the key whatever its value: ~{key}"
    return UserError(f"{escape(text)}: the key has another value", key=key, hint=hint)


_TOLD: tuple[tuple[str, Callable[[str, Attempt], UserError]], ...] = (
    (r"Could not override '([^']*)'", _unknown_key),
    (r"Could not delete '([^']*)'\. No match", _nothing_to_delete),
    (r"Could not delete from config\. '([^']*)' does not exist", _nothing_to_delete),
    (r"Could not delete from config\. The value of '([^']*)'", _deleted_with_another_value),
    (r"Ambiguous value for argument '(.*)'\n1\.", _several_values),
    (r"Sweep parameters '(.*)' requires", _sweep),
)
