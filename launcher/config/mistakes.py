"""Mistakes in overrides and files of the tree, explained. Imported only after a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from launcher.config.hydra_setup import RESOLVERS
from launcher.config.nemo_launcher import way
from launcher.config.overrides import (
    GROUPS,
    MAIN,
    NoSuchChoice,
    Override,
    choice_hint,
    find_nearest_choice,
    hydra_value,
    is_text,
    options_of,
    parse_override,
    quote_for_shell,
)
from launcher.config.schema import ClusterConfig, RunConfig
from launcher.config.secrets import NEMO_NODES, Placeholder, placeholder_in
from launcher.config.sources import locate_text
from launcher.config.tree_composer import Fault, MissingValue, NotApplied, TreeComposer, nodes
from launcher.config.values import MOST_KEYS
from launcher.errors import Mistakes, UserError, did_you_mean, escape, nearest, setting_error
from launcher.runs.paths import display_path
from launcher.slurm.sbatch_options import key_hint

_OPEN = ("image.versions",)  # a template of the user's own may build others
# Mappings that a site fills with its own figures, checked elsewhere.
_SITES = ("estimates.attained", "cluster.gpu_types")

# What Hydra's grammar takes for a key, or for a group.
_KEY = re.compile(r"[A-Za-z_$][\w$-]*([./]([A-Za-z_$][\w$-]*|\d+))*", re.ASCII)

_MOST_NEAR = 3
_MOST_TRIED = 8  # compositions that look for further mistakes


@dataclass(frozen=True)
class Attempt:
    """A composition that failed; `check` composes other overrides, and holds them against the schema."""

    overrides: Sequence[str]
    trees: TreeComposer
    check: Callable[[Sequence[str]], object]

    @property
    def is_launch(self) -> bool:
        """True if the root file of a launch is composed."""
        return self.trees.primary == MAIN

    @property
    def choices(self) -> list[str]:
        """The overrides that choose stages and files of groups."""
        parsed = map(parse_override, self.overrides)
        return [item.text for item in parsed if item.key == "stages" or (item.is_choice and not item.sign)]

    def takes(self, text: str) -> bool:
        """Return True if an override that a hint proposes is accepted together with the choices."""
        try:
            self.check([*self.choices, text])
        except UserError as error:
            return all(mistake.key != parse_override(text).key for mistake in error.mistakes)
        except (HydraException, OmegaConfBaseException, NotApplied):
            return False
        return True

    @cached_property
    def tree(self) -> DictConfig | None:
        """The tree of the choices alone, to look up the existing keys in."""
        try:
            return self.trees.compose_again(self.choices).tree
        except (HydraException, OmegaConfBaseException, UserError, NotApplied):
            return None

    @cached_property
    def keys(self) -> list[str]:
        """All keys of the tree, each with its parents."""
        return [] if self.tree is None else _keys_of(OmegaConf.to_container(self.tree))

    def override_of(self, key: str) -> str:
        """Return the override that sets a key, as the user wrote it, or else the key."""
        return next((text for text in reversed(self.overrides) if parse_override(text).key == key), key)

    def no_choice(self, group: str, choice: str) -> NoSuchChoice:
        """Return the error about an unknown choice of a group, with the valid ones."""
        hint = way(group, choice) or choice_hint(choice, options_of(group, self.trees.roots))
        return NoSuchChoice(group, choice, hint)


def _keys_of(mapping: Any) -> list[str]:
    paths = [path for path, _ in nodes(mapping) if path]
    return [".".join(map(str, path)) for path in paths if not any(isinstance(part, int) for part in path)]


def explain_all(error: Exception, attempt: Attempt) -> UserError | None:
    """Explain all mistakes of a command line; return ``None`` if the mistake is ours.

    The composition is tried again without the wrong overrides, for as long as there are others.
    """
    mistakes: list[UserError] = []
    left = list(attempt.overrides)
    for _ in range(_MOST_TRIED):
        rest = replace(attempt, overrides=left)
        try:
            attempt.check(left)
            last = None
        except Exception as another:
            last = explain(another, rest)
        if last is None and not mistakes:
            last = explain(error, rest)
        if last is None:
            break
        # A removed value is not missing, and its replacement is not the user's.
        ours = {mistake.key for mistake in mistakes}
        mistakes += [mistake for mistake in last.mistakes if mistake.key not in ours]
        if (remaining := _drop_fault(last, left, attempt)) == left:
            break
        left = remaining
    if len(mistakes) < 2:
        return next(iter(mistakes), None)
    return Mistakes(_sort_mistakes(mistakes, attempt.overrides))


def _drop_fault(error: UserError, overrides: Sequence[str], attempt: Attempt) -> list[str]:
    """Remove the overrides that caused an error, if any did."""
    keys = {mistake.key for mistake in error.mistakes if mistake.key}
    if "stages" in keys:  # they decide which keys there are
        return list(overrides)
    rest = []
    for text in overrides:
        item = parse_override(text)
        if not any(_sets(item, key) for key in keys):
            rest.append(text)
        elif item.key in GROUPS and item.value is not None:
            near = find_nearest_choice(item.value, options_of(item.key, attempt.trees.roots))
            rest += [f"{item.key}={near}"] if near and near != item.value else []
    return [*rest, *(f"++{item.key}=0" for item in error.mistakes if isinstance(item, MissingValue))]


def _sets(override: Override, key: str) -> bool:
    return override.key == key or (not override.is_choice and key.startswith(f"{override.key}."))


def _sort_mistakes(mistakes: Sequence[UserError], overrides: Sequence[str]) -> list[UserError]:
    """Sort mistakes in the order of the command line; those of files come last."""
    items = [parse_override(text) for text in overrides]

    def position(mistake: UserError) -> int:
        places = [place for place, item in enumerate(items) if mistake.key and _sets(item, mistake.key)]
        return places[-1] if places else len(items)

    return sorted(mistakes, key=position)


def explain(error: Exception, attempt: Attempt) -> UserError | None:
    """Explain the user's mistake; return ``None`` if the mistake is ours."""
    if attempt.is_launch and (of_nemo := _nemo_root(attempt.trees.roots)) is not None:
        return of_nemo
    of_root = _mistakes_of_root(attempt.trees.roots) if attempt.is_launch else []
    if of_root:
        return Mistakes(of_root)
    if isinstance(error, NoSuchChoice):
        return attempt.no_choice(error.group, error.choice)
    if isinstance(error, NotApplied):
        mistakes = [mistake for fault in error.faults for mistake in _explain_fault(fault, attempt).mistakes]
        return Mistakes(list({mistake.key: mistake for mistake in mistakes}.values()))
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error, attempt)
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        return _explain_value(error.__cause__, attempt.keys)
    if isinstance(error, OmegaConfBaseException):
        return _explain_value(error, attempt.keys)
    if isinstance(error, HydraException | yaml.YAMLError):
        first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
        return UserError(escape(first), hint=" ".join(rest[:2]) or None)
    return error if isinstance(error, UserError) else None


def _explain_fault(fault: Fault, attempt: Attempt) -> UserError:
    """Explain why an override cannot be applied."""
    text, override = fault.text, fault.parsed
    if override is None:
        return _explain_unparsed(text)
    key, value = override.key_or_group, parse_override(text).value or ""
    if override.is_sweep_override():
        if key in GROUPS:
            return attempt.no_choice(key, value)
        if override.value_type != ValueType.SIMPLE_CHOICE_SWEEP:
            return setting_error(f"{escape(text)}: sweeps are not supported: one launch has one value")
        if attempt.keys and key not in attempt.keys and not is_text(parse_override(text)):
            return _explain_unknown_key(key, attempt)
        hints = {
            f"{key}=[{value}]": f"a list: {quote_for_shell(f'{key}=[{value}]')}",
            f"{key}={hydra_value(value)}": _hint_quotes(key, value),
        }
        is_number = isinstance(OmegaConf.select(attempt.tree or DictConfig({}), key), int | float)
        taken = [hint for way, hint in hints.items() if not is_number and attempt.takes(way)]
        hint = "\n".join(taken) or "one launch for each value: slipway sweep"
        return setting_error(f"{escape(text)}: several values for one key", hint)
    if override.is_delete():
        return _explain_undeleted(text, key, attempt)
    if isinstance(fault.error, ConfigKeyError | ConfigAttributeError):
        return _explain_unknown_key(key, attempt)
    assert isinstance(fault.error, OmegaConfBaseException)
    return _explain_value(fault.error, attempt.keys)


def _explain_missing_file(error: MissingConfigException, attempt: Attempt) -> UserError:
    name = error.missing_cfg_file or ""
    parsed = [parse_override(text) for text in attempt.overrides]
    group = next((item.key for item in parsed if name.startswith(f"{item.key}/")), name.partition("/")[0])
    parent = re.match(r"In '([^']+)'", str(error))
    is_requested = any(name == f"{item.key}/{item.value}" for item in parsed)
    choice = name.removeprefix(f"{group}/")
    if is_requested or parent is None or parent[1] == "config" or group == name:
        return attempt.no_choice(group, choice)
    options = options_of(group, attempt.trees.roots)
    near = find_nearest_choice(choice, options) or ""
    return UserError(
        f"{escape(name)}: there is no such file to build on",
        source=locate_text(parent[1], name.rpartition("/")[2], attempt.trees.roots),
        # A family's file is built on by its whole path.
        hint=f"did you mean '/{group}/{near}@_here_'?" if "/" in near else choice_hint(choice, options),
    )


def _explain_unparsed(text: str) -> UserError:
    """Explain an override that is not in Hydra's grammar."""
    override = parse_override(text)
    if not _KEY.fullmatch(override.key) or override.value is None:
        return UserError(f"{escape(text)}: not a key", key=override.key, hint="keys are like cluster.mem")
    value = override.value
    placeholder = placeholder_in(override.key, value)
    if placeholder is not None:
        return Placeholder(override.key, value, placeholder)
    hint: str | None
    if not value.isprintable():
        what, hint = "a line break or another control character needs quotes around the value", None
    elif value.startswith(("[", "{")):
        what, hint = "Hydra cannot read this", "a list is [a, b], a mapping {key: value}"
    elif value.startswith(("'", '"')) or value.count("${") > value.count("}"):
        what, hint = "a quote or an interpolation is not closed", _hint_quotes(override.key, value)
    else:
        what, hint = (
            "a character in this value means something else to Hydra",
            _hint_quotes(override.key, value),
        )
    return UserError(f"{escape(text)}: {what}", key=override.key, hint=hint)


def _hint_quotes(key: str, value: str) -> str:
    text = value.strip("'\"") if value.startswith(("'", '"')) else value
    return f"if it is text, quote it twice: {quote_for_shell(f'{key}={hydra_value(text)}')}"


def _explain_unknown_key(key: str, attempt: Attempt) -> UserError:
    tree = attempt.tree
    if any(f"{key}.".startswith(f"{site}.") for site in _SITES):
        text = attempt.override_of(key)
        added = f"+{key}={parse_override(text).value or '...'}"
        message = f"{escape(text)}: a part of this key is new, and new keys are added with +"
        return UserError(
            message, key=key, hint=f"to add it: {quote_for_shell(added) if ' ' in added else added}"
        )
    within = _find_unknown_within(key, attempt) if tree is not None and key in attempt.keys else []
    if within:
        return Mistakes([_explain_no_such_key(inner, inner, attempt) for inner in within])
    return _explain_no_such_key(key, attempt.override_of(key), attempt)


def _find_unknown_within(key: str, attempt: Attempt) -> list[str]:
    """Return the keys of a mapping on the command line that the tree does not have."""
    value = parse_override(attempt.override_of(key)).value or ""
    try:
        mapping = OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException:
        return []
    below = [f"{key}.{inner}" for inner in _keys_of(mapping)] if isinstance(mapping, dict) else []
    unknown = [inner for inner in below if inner not in attempt.keys]
    # An unknown key is reported without the keys below it.
    return [inner for inner in unknown if inner.rpartition(".")[0] not in unknown]


def _explain_no_such_key(key: str, text: str, attempt: Attempt) -> UserError:
    parent, _, name = key.rpartition(".")
    tree, start = attempt.tree, f"{escape(text)}: there is no such key"
    if tree is None:
        return UserError(start, key=key)
    if hint := way(key.partition(".")[0]):
        return UserError(start, key=key, hint=hint)
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig):
        hint = f"{parent} is not there, or holds no keys"
        # As NeMo's documentation and the notes of a stage name it.
        if f"training.{key}" in attempt.keys:
            hint = f"did you mean 'training.{key}'?"
        if key.startswith("image.") and attempt.is_launch:
            hint = f"keys of a recipe go to `slipway image build NAME {escape(attempt.override_of(key))}`"
        return UserError(start, key=key, hint=hint)
    return UserError(start, key=key, hint=_hint_keys(parent, name, [str(child) for child in node], attempt))


def _hint_keys(parent: str, name: str, valid: Sequence[str], attempt: Attempt) -> str:
    if parent == "cluster" and (option := key_hint(name)):
        return option
    hint = did_you_mean(name, valid, MOST_KEYS) or "it holds no keys yet"
    value = parse_override(attempt.override_of(f"{parent}.{name}".lstrip("."))).value

    def is_taken(key: str) -> bool:
        return value is None or attempt.takes(f"{key}={value}")

    near = [f"{parent}.{other}".lstrip(".") for other in nearest(name, valid)]
    # Of the same name, and of a longer one: of nodes training.trainer.num_nodes too.
    ends, begin = (f".{name}", f"_{name}"), f".{name}_"
    elsewhere = [key for end in ends for key in attempt.keys if key.endswith(end)]
    elsewhere += [key for key in attempt.keys if begin in key and "." not in key.rpartition(begin)[2]]
    elsewhere = elsewhere[:_MOST_NEAR]
    if near and elsewhere and not is_taken(near[0]) and (better := list(filter(is_taken, elsewhere))):
        near, elsewhere = [], better
    if elsewhere and not near:
        hint = f"did you mean {' or '.join(map(repr, elsewhere))}?"
    # NeMo's own nodes may be given keys that our tree does not show.
    if parent.startswith(NEMO_NODES) or parent in _OPEN:
        hint += f"\nto add it all the same: +{parent}.{name}=..."
    return hint


def _explain_undeleted(text: str, key: str, attempt: Attempt) -> UserError:
    if "=" in text and attempt.tree is not None and OmegaConf.select(attempt.tree, key) is not None:
        drop = f"to drop the key with any value: ~{key}"
        return UserError(f"{escape(text)}: the key has another value", key=key, hint=drop)
    if key in attempt.keys:
        return UserError(f"~{escape(key)}: it is null already", key=key, hint="there is nothing to drop")
    hint = did_you_mean(key, nearest(key, attempt.keys, _MOST_NEAR))
    return UserError(f"~{escape(key)}: there is no such key", key=key, hint=hint)


def _explain_value(error: OmegaConfBaseException, keys: Sequence[str]) -> UserError:
    """Explain a value that is missing, or a reference to a key that does not exist."""
    key = str(error.full_key or "")
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    start = f"{escape(key)}: " if key else ""
    if match := re.search(r"Missing mandatory value: ([\w.]+)", message):
        return MissingValue(key if isinstance(error, MissingMandatoryValue) else match[1])
    if isinstance(error, InterpolationKeyError):
        return _explain_reference(key, message, keys)
    if match := re.search(r"Unsupported interpolation type (\S+)", message):
        valid = did_you_mean(match[1], (*RESOLVERS, "oc.decode", "oc.select"))
        return UserError(f"{start}there is no resolver {match[1]!r}", key=key, hint=valid)
    if "Recursive interpolation" in message:
        return UserError(f"{start}it refers to itself", key=key, hint="give it a value")
    if match := re.search(r"node `([^`]*)` is not a container", message):
        return UserError(f"{match[1]}: expected keys below it, not a value", key=match[1])
    if "Cannot merge DictConfig with ListConfig" in message:
        return UserError(f"{start}expected a list, such as [a, b]", key=key)
    message = re.sub(r"^(\w+) raised while resolving interpolation: $", r"its resolver ends with \1", message)
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message)
    # OmegaConf's further lines are indented.
    hint = next((line for line in str(error).splitlines()[1:] if line[:1] not in ("", " ")), None)
    return UserError(f"{start}{escape(message[:1].lower() + message[1:])}", key=key or None, hint=hint)


def _explain_reference(key: str, message: str, keys: Sequence[str]) -> UserError:
    start = escape(key)
    match = re.search(r"Interpolation key '([^']*)' not found", message)
    name = match[1] if match else ""
    near = nearest(name, [other for other in keys if other != name])
    hint = f"did you mean '${{{near[0]}}}'?" if near else "whole keys are meant, such as ${cluster.partition}"
    group = name.partition(".")[0]
    if near and near[0].startswith(f"{group}.{group}."):
        hint = f"the file in {group}/ that is built on is named with @_here_: - /{group}/FAMILY/NAME@_here_"
    if name.startswith("SLURM_"):
        hint = f"the job's own is known in its tasks alone: env_expand takes ${name}, without braces"
    elif name.isupper() and "." not in name:
        hint = f"of the environment: ${{oc.env:{name}}}; or let envsubst fill it in before"
    if name.startswith("cluster.") and name.removeprefix("cluster.") in ClusterConfig.model_fields:
        key = "cluster"
        hint = "a file in cluster/ builds on another: defaults: [bcm, _self_], which is NeMo in its container"
    return UserError(f"{start}=${{{name}}}: there is no key {name!r} to refer to", key=key, hint=hint)


# --- the root file of the user's own tree

_LISTED = 12  # missing keys that one message names


def _mistakes_of_root(roots: Sequence[Path]) -> list[UserError]:
    """Return the mistakes in the root files of the user's own trees, down to the first complete one."""
    mistakes: list[UserError] = []
    for path in (file for root in roots[:-1] if (file := root / f"{MAIN}.yaml").is_file()):
        try:
            node = yaml.compose(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):  # reported elsewhere
            break
        if not isinstance(node, yaml.MappingNode):
            break
        mistakes += _find_unknown(path, node, roots)
        if not _builds_on_next(node):
            return [*mistakes, *_find_missing(path, node, roots[-1] / f"{MAIN}.yaml")]
    return mistakes


def _builds_on_next(node: yaml.MappingNode) -> bool:
    lists = [value.value for key, value in node.value if key.value == "defaults"]
    return any(getattr(entry, "value", None) == MAIN for entries in lists for entry in entries)


def _find_unknown(path: Path, node: yaml.MappingNode, roots: Sequence[Path]) -> Iterator[UserError]:
    """Yield a mistake for each unknown group and each unknown key of a root file."""
    for name, choice, line in _choices(node):
        known = name in GROUPS or name.startswith("hydra/") or any((root / name).is_dir() for root in roots)
        if not known and choice not in ("null", "~", ""):
            yield _explain_unknown_entry(path, line, name, f"{name}={choice}: there is no such group", GROUPS)
    for key, _ in node.value:
        if key.value not in (*RunConfig.model_fields, "defaults", "hydra"):
            text, line = f"{key.value}: there is no such key", key.start_mark.line + 1
            yield _explain_unknown_entry(path, line, key.value, text, RunConfig.model_fields)


def _explain_unknown_entry(path: Path, line: int, name: str, text: str, valid: Iterable[str]) -> UserError:
    near = did_you_mean(name, valid, MOST_KEYS) or ""
    hint = way(name) or (near if near.startswith("did") else f"remove this line; {near}")
    return UserError(escape(text), source=f"from {escape(display_path(path))}:{line}", hint=hint)


def _find_missing(path: Path, node: yaml.MappingNode, ours: Path) -> Iterator[UserError]:
    present = {key.value for key, _ in node.value} | {name for name, _, _ in _choices(node)}
    needed = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    missing = [name for name in dict.fromkeys((*GROUPS, *needed)) if name not in present]
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        yield UserError(
            f"{escape(display_path(path))}: {', '.join(missing[:_LISTED])}{more}: missing",
            hint=f"it replaces {display_path(ours)}; to build on that: defaults: [{MAIN}, _self_]",
        )


def _nemo_root(roots: Sequence[Path]) -> UserError | None:
    """Return the mistake of a NeMo launcher's root in front of ours."""
    path = next((file for root in roots[:-1] if (file := root / f"{MAIN}.yaml").is_file()), None)
    if path is None or not re.search(r"^training_config:", path.read_text(errors="replace"), re.MULTILINE):
        return None
    message = f"{escape(display_path(path))}: the root of a NeMo launcher's tree"
    return UserError(
        message, hint=f"slipway adopt {quote_for_shell(display_path(path.parent))} makes one of ours"
    )


def _choices(node: yaml.MappingNode) -> Iterator[tuple[str, str, int]]:
    """Return the groups of the defaults list, each with its choice and its line."""
    for key, value in node.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for entry in value.value:
                for group, choice in entry.value if isinstance(entry, yaml.MappingNode) else ():
                    name = group.value.removeprefix("override ").removeprefix("optional ")
                    yield name.partition("@")[0].lstrip("/"), str(choice.value), group.start_mark.line + 1
