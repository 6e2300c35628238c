"""What Hydra says of the user's overrides, as errors that help. Imported only after a mistake was found."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.errors import OverrideParseException as ParseError
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.broken import broken_trees, explain_value
from launcher.config.choices import choice_hint, options_of
from launcher.config.overrides import GROUPS, MAIN, NoSuchChoice, hydra_value, parse_override
from launcher.config.sources import locate_text
from launcher.errors import UserError, did_you_mean, nearest, one_line

# NeMo's own nodes may be given keys that our tree does not show.
_PASS_THROUGH = ("training.trainer", "training.exp_manager", "training.model")

# What Hydra's grammar takes for a key, or for a group.
_KEY = re.compile(r"[A-Za-z_$][\w$-]*([./]([A-Za-z_$][\w$-]*|\d+))*", re.ASCII)

_MOST_NEAR = 3


@dataclass(frozen=True)
class Attempt:
    """A composition that failed.

    Attributes
    ----------
    overrides
        As the user gave them.
    roots
        The trees, the one that is looked at first coming first.
    compose
        Composes again, with other overrides.
    primary
        The file that is composed.
    """

    overrides: Sequence[str]
    roots: Sequence[Path]
    compose: Callable[[Sequence[str]], DictConfig]
    primary: str = MAIN

    @cached_property
    def tree(self) -> DictConfig | None:
        """What the choices alone compose to, to look up which keys there are."""
        parsed = [parse_override(text) for text in self.overrides]
        kept = [item.text for item in parsed if item.key == "stages" or (item.is_choice and not item.sign)]
        try:
            tree = self.compose(kept)
        except (HydraException, OmegaConfBaseException, UserError):
            return None
        OmegaConf.set_struct(tree, False)
        tree.pop("hydra", None)
        return tree

    @cached_property
    def keys(self) -> list[str]:
        """All keys of the tree, each with its parents."""
        return list(_keys_below(self.tree)) if self.tree is not None else []

    def override_of(self, key: str) -> str:
        """The override that sets a key, as the user wrote it, or else the key."""
        return next((text for text in self.overrides if parse_override(text).key == key), key)


def _keys_below(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, child in node.items_ex(resolve=False):
        yield f"{prefix}{name!s}"
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _keys_below(child, f"{prefix}{name!s}.")


def explain(error: Exception, attempt: Attempt) -> UserError | None:
    """Say what the user's mistake was; ``None`` if it was not one, but a mistake of ours."""
    if isinstance(error, NoSuchChoice):
        return _no_choice(error.group, error.choice, attempt)
    if isinstance(error, UserError):
        return error
    if isinstance(error, MissingConfigException):
        return _missing_file(error, attempt)
    broken = broken_trees(error, attempt.overrides, attempt.roots, attempt.primary)
    if broken is not None:
        return broken
    if isinstance(error, ParseError):
        # As the user wrote it: variables are quoted on the way.
        return _not_parsed(attempt.override_of(parse_override(error.override).key))
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        return _composition(error, attempt) or explain_value(error.__cause__, attempt.keys)
    if isinstance(error, OmegaConfBaseException):
        return explain_value(error, attempt.keys)
    if isinstance(error, HydraException):
        return _composition(error, attempt) or _as_told(error)
    return None


def _as_told(error: Exception) -> UserError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(one_line(lines[0]), hint=" ".join(lines[1:3]) or None)


def _no_choice(group: str, choice: str, attempt: Attempt) -> UserError:
    hint = choice_hint(choice, options_of(group, attempt.roots))
    return UserError(f"{group}={one_line(choice)}: there is no such choice", key=group, hint=hint)


def _missing_file(error: MissingConfigException, attempt: Attempt) -> UserError:
    name = error.missing_cfg_file or ""
    parsed = [parse_override(text) for text in attempt.overrides]
    group = next((item.key for item in parsed if name.startswith(f"{item.key}/")), name.partition("/")[0])
    parent = re.match(r"In '([^']+)'", str(error))
    asked = any(name == f"{item.key}/{item.value}" for item in parsed)
    choice = name.removeprefix(f"{group}/")
    if asked or parent is None or parent[1] == "config" or group == name:
        return _no_choice(group, choice, attempt)
    return UserError(
        f"{one_line(name)}: there is no such file to build on",
        source=locate_text(parent[1], name.rpartition("/")[2], attempt.roots),
        hint=choice_hint(choice, options_of(group, attempt.roots)),
    )


def _not_parsed(text: str) -> UserError:
    """An override that is not in Hydra's grammar."""
    override = parse_override(text)
    if not _KEY.fullmatch(override.key) or override.value is None:
        return UserError(f"{one_line(text)}: not a key", key=override.key, hint="keys are like cluster.mem")
    value = override.value
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
    return UserError(f"{one_line(text)}: {what}", key=override.key, hint=hint)


def _quoted(key: str, value: str) -> str:
    text = value.strip("'\"") if value.startswith(("'", '"')) else value
    return f"if it is text, quote it twice: {_for_shell(f'{key}={hydra_value(text)}')}"


def _for_shell(text: str) -> str:
    """Quote for the shell; what Hydra sees as quoted already is easier to read in double quotes."""
    return shlex.quote(text) if re.search(r'["$`!\\]', text) or "'" not in text else f'"{text}"'


def _composition(error: Exception, attempt: Attempt) -> UserError | None:
    """What Hydra says when it applies overrides, by the beginning of its message."""
    told = str(error)
    for pattern, handler in _TOLD:
        found = re.match(pattern, told, re.DOTALL)
        if found:
            return handler(found[1], attempt)
    return None


def _unknown_key(key: str, attempt: Attempt) -> UserError:
    parent, _, name = key.rpartition(".")
    start = f"{one_line(attempt.override_of(key))}: there is no such key"
    tree = attempt.tree
    if tree is None:
        return UserError(start, key=key)
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig):
        return UserError(start, key=key, hint=f"{parent} is not there, or holds no keys")
    return UserError(start, key=key, hint=_near_keys(parent, name, [str(child) for child in node], attempt))


def _near_keys(parent: str, name: str, valid: Sequence[str], attempt: Attempt) -> str:
    hint = did_you_mean(name, valid) or "it holds no keys yet"
    # Of the same name, and of a longer one: of nodes training.trainer.num_nodes too.
    elsewhere = [key for end in (f".{name}", f"_{name}") for key in attempt.keys if key.endswith(end)]
    elsewhere = elsewhere[:_MOST_NEAR]
    if elsewhere and not nearest(name, valid):
        hint = f"did you mean {' or '.join(map(repr, elsewhere))}?"
    if parent.startswith(_PASS_THROUGH):
        hint += f" To add it all the same: +{parent}.{name}=..."
    return hint


def _nothing_to_delete(key: str, attempt: Attempt) -> UserError:
    if key in attempt.keys:
        return UserError(f"~{one_line(key)}: it is null already", key=key, hint="there is nothing to drop")
    hint = did_you_mean(key, nearest(key, attempt.keys, _MOST_NEAR))
    return UserError(f"~{one_line(key)}: there is no such key", key=key, hint=hint)


def _is_there_already(key: str, attempt: Attempt) -> UserError:
    text = attempt.override_of(key)
    return UserError(
        f"{one_line(text)}: this key is there already",
        key=key,
        hint=f"without the +: {shlex.quote(text.lstrip('+'))}",
    )


def _several_values(text: str, attempt: Attempt) -> UserError:
    override = parse_override(text)
    if override.key in GROUPS:
        return _no_choice(override.key, override.value or "", attempt)
    value = override.value or ""
    return UserError(
        f"{one_line(text)}: several values for one key",
        key=override.key,
        hint=f"a list: {_for_shell(f'{override.key}=[{value}]')}\n{_quoted(override.key, value)}",
    )


def _sweep(text: str, attempt: Attempt) -> UserError:
    key = parse_override(text).key
    return UserError(f"{one_line(text)}: sweeps are not supported: one launch has one value", key=key)


def _deleted_with_another_value(key: str, attempt: Attempt) -> UserError:
    text = attempt.override_of(key)
    hint = f"to drop the key whatever its value: ~{key}"
    return UserError(f"{one_line(text)}: the key has another value", key=key, hint=hint)


_TOLD: tuple[tuple[str, Callable[[str, Attempt], UserError]], ...] = (
    (r"Could not override '([^']*)'", _unknown_key),
    (r"Could not delete '([^']*)'\. No match", _nothing_to_delete),
    (r"Could not delete from config\. '([^']*)' does not exist", _nothing_to_delete),
    (r"Could not delete from config\. The value of '([^']*)'", _deleted_with_another_value),
    (r"Could not append to config\. An item is already at '([^']*)'", _is_there_already),
    (r"Multiple values for ([\w/]+)\.", _is_there_already),
    (r"Ambiguous value for argument '(.*)'\n1\.", _several_values),
    (r"Sweep parameters '(.*)' requires", _sweep),
)
