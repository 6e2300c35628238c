"""Overrides to a checked configuration, with Hydra's compose API.

Hydra's `@hydra.main` would compose twice, change the working directory's meaning and own the exit code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.config.hydra_setup import replace_gpus
from launcher.config.nemo_launcher import OTHER_SCRIPTS, describe_other_script, model_type_of
from launcher.config.overrides import (
    DEVICES,
    GRES,
    NODE_GPUS,
    escape_interpolation,
    is_derived_from_gpus,
    options_of,
    parse_override,
)
from launcher.config.schema import Model, RunConfig, parse
from launcher.config.secrets import check_references, check_secrets, placeholders_in, secret_references
from launcher.config.sources import Sources
from launcher.config.tree_composer import ComposedTree, TreeComposer
from launcher.config.values import NumberForText, expand_home, expand_homes
from launcher.errors import Mistakes, UserError, absolute_path, check_directory, escape, literal
from launcher.runs.paths import display_path

# In the wheel a directory, in a checkout a link; resolved, so that messages name a file once.
CONF_DIR = (Path(__file__).parents[1] / "conf").resolve()

_YES = ("true", "1", "yes", "on")
# A directory of one launch: of a wrapper that makes its own, or of a launch that is rendered again.
_STAMPED = re.compile(r"-\d{8}-\d{6}[^/]*$")

# Relative paths start in the user's working directory; a job starts elsewhere.
PATH_KEYS = ("launcher_scripts_path", "data_dir", "base_results_dir", "images_dir")


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed and checked configuration."""

    config: RunConfig
    # The option chosen in each group, such as {"training": "gpt3/126m"}.
    choices: dict[str, str]
    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...] = ()
    # The configurations of the stages that are launched before this one.
    before: tuple[RunConfig, ...] = ()
    # Keys of values that refer to variables with a secret's name, and these variables.
    references: Mapping[str, str] = field(default_factory=dict)

    def annotate(self, error: UserError) -> None:
        """Add the sources of the offending values to an error."""
        self.sources().annotate(error)

    @contextmanager
    def annotated(self) -> Iterator[None]:
        """Add the sources of the offending values to the errors raised inside."""
        try:
            yield
        except UserError as error:
            self.annotate(error)
            raise

    def sources(self) -> Sources:
        return Sources(self.overrides, tree_roots(self.config_dirs))


def compose(overrides: Sequence[str], config_dirs: tuple[Path, ...] = ()) -> Composition:
    """Compose the configuration tree and check it; raise UserError for the mistakes in it."""
    return BatchComposer(overrides, config_dirs, once=True).compose()


class BatchComposer:
    """Composes points of the same choices, all after the first in a fraction of its time.

    Files of the tree that change meanwhile are not looked at again.
    """

    def __init__(
        self, base: Sequence[str], config_dirs: tuple[Path, ...] = (), *, once: bool = False
    ) -> None:
        self._base, self._config_dirs, self._once = tuple(base), config_dirs, once
        self._roots = tree_roots(config_dirs)
        self._trees = TreeComposer(self._roots)
        self._sources: dict[tuple[str, ...], Sources] = {}

    def compose(self, point: Sequence[str] = ()) -> Composition:
        """Compose one point: the shared overrides, and then its own."""
        overrides = (*self._base, *point)
        with _explained(overrides, self._config_dirs, self._trees, self._compose_again):
            if self._once:
                return self._check(self._trees.compose(overrides), overrides)
            return self._compose_again(overrides)

    def _compose_again(self, overrides: Sequence[str]) -> Composition:
        return self._check(self._trees.compose_again(overrides), overrides)

    def _check(self, composed: ComposedTree, overrides: Sequence[str]) -> Composition:
        settle_directories(composed)
        derive_from_gpus(composed, overrides)
        settle_model_type(composed)
        for root in self._roots[:-1]:
            check_nesting(root)
        sources = Sources(overrides, self._roots)
        sources = Sources(overrides, self._roots, like=self._sources.setdefault(composed.key, sources))
        config, node = _checked_as(RunConfig, composed, sources)
        choices = {group: choice for group, choice in composed.choices.items() if group in node}
        references = secret_references(composed.tree, node)
        return Composition(config, choices, tuple(overrides), self._config_dirs, references=references)


def compose_file(
    name: str, overrides: Sequence[str], model: type[Model], config_dirs: tuple[Path, ...] = ()
) -> Model:
    """Compose one file of the tree with its defaults, and check it against a schema."""
    roots = tree_roots(config_dirs)
    trees = TreeComposer(roots, name)

    def check(composed: ComposedTree, texts: Sequence[str]) -> Model:
        config, node = _checked_as(model, composed, Sources(texts, roots, primary=name))
        check_references(secret_references(composed.tree, node))
        check_secrets(config)
        return config

    with _explained(overrides, config_dirs, trees, lambda texts: check(trees.compose_again(texts), texts)):
        return check(trees.compose(overrides), overrides)


def _checked_as(model: type[Model], composed: ComposedTree, sources: Sources) -> tuple[Model, dict[str, Any]]:
    """Hold a tree against the schema; numbers that are meant as text are read as they were written."""
    node = expand_homes(composed.resolved())
    try:
        return _accepted(model, node, sources), node
    except Mistakes as error:
        numbers = [mistake for mistake in error.mistakes if isinstance(mistake, NumberForText)]
        if not numbers:
            raise
    for number in numbers:
        text = sources.written(number.path) or str(number.value)
        composed.set(number.path, escape_interpolation(text))
    node = expand_homes(composed.resolved())
    return _accepted(model, node, sources), node


def _accepted(model: type[Model], node: Mapping[str, Any], sources: Sources) -> Model:
    placeholders = placeholders_in(node, sources)
    try:
        parsed = parse(model, node)
    except Mistakes as error:
        left = {mistake.key for mistake in placeholders}
        others = [mistake for mistake in error.mistakes if mistake.key not in left]
        raise Mistakes([*placeholders, *others]) from error
    if placeholders:
        raise Mistakes(placeholders)
    return parsed


def settle_directories(composed: ComposedTree) -> None:
    """Make the keys that hold paths absolute, and the results' unique if wanted: other keys refer to them."""
    tree = composed.tree
    for key in PATH_KEYS:
        if OmegaConf.is_missing(tree, key) or key not in tree:
            raise UserError(f"{key}: a directory is needed", key=key, hint=f"give one: {key}=DIR")
        if tree[key] in (None, ""):
            raise UserError(f"{key}={literal(tree[key])}: a directory is needed", key=key)
        composed.set(key, escape_interpolation(str(absolute_path(expand_home(str(tree[key])), key))))
    if "unique_output_dir" not in tree:  # in a config.yaml that is older than the key
        composed.set("unique_output_dir", "${oc.env:UNIQUE_OUTPUT_DIR,False}")
    results = tree["base_results_dir"]
    if str(tree["unique_output_dir"]).lower() in _YES and not _STAMPED.search(results):
        composed.set("base_results_dir", escape_interpolation(f"{results}-{_timestamp()}"))


@cache
def _timestamp() -> str:
    """Return the time of this process's first composition: one command launches into one place."""
    now = datetime.now()
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03}"


def derive_from_gpus(composed: ComposedTree, overrides: Sequence[str]) -> None:
    """Derive tasks and ``gres`` from the GPUs of a node that the user typed, not from the files."""
    tree, parsed = composed.tree, [parse_override(text) for text in overrides]
    following = [key for key in (DEVICES, GRES) if is_derived_from_gpus(key, parsed)]
    gpus = OmegaConf.select(tree, NODE_GPUS) if following else None
    if type(gpus) is not int or gpus < 1:
        return  # null, or refused by the schema
    if DEVICES in following and "training" in tree:
        composed.set(DEVICES, gpus)
    gres = OmegaConf.select(tree, GRES) if GRES in following else None
    if isinstance(gres, str):
        composed.set(GRES, replace_gpus(gres, gpus))


def check_nesting(root: Path) -> None:
    """Refuse an unread `cluster/` inside `cluster/`, which a second `cp -R` makes."""
    nested = root / "cluster/cluster"
    if nested.is_dir():
        message = f"{escape(display_path(nested))}: a copy of the folder inside itself, which nothing reads"
        hint = "a second `cp -R` into a folder makes it: move its files up, or remove it"
        raise UserError(message, hint=hint)


def settle_model_type(composed: ComposedTree) -> None:
    """Choose the script of a size that does not, as the NeMo launcher did by its group; drop its search path.

    Raise UserError if NeMo trains such a family with a script that no engine of ours runs.
    """
    choice, training = composed.choices.get("training", ""), composed.tree.get("training")
    run = training.get("run") if isinstance(training, DictConfig) else None
    if not isinstance(run, DictConfig):
        return
    training.pop("hydra", None)  # NeMo's own conf/, which its sizes name and do not use
    if "model_type" in run:
        return
    family = choice.partition("/")[0]
    if family in OTHER_SCRIPTS:
        message = (
            f"training={choice}: NeMo trains it with {Path(OTHER_SCRIPTS[family]).name}, which no engine runs"
        )
        raise UserError(message, key="training", hint=describe_other_script(family))
    composed.set("training.run.model_type", model_type_of(choice, training.get("model") or {}))


@contextmanager
def _explained(
    overrides: Sequence[str],
    config_dirs: tuple[Path, ...],
    trees: TreeComposer,
    check: Callable[[Sequence[str]], object],
) -> Iterator[None]:
    """Turn an error of Hydra's or OmegaConf's into one that helps; leave any other as it is."""
    for directory in config_dirs:
        check_directory("--config-dir", directory)
    try:
        yield
    except Exception as error:
        # Imported late: most configurations have no mistake.
        from launcher.config.mistakes import Attempt, explain_all

        explained = explain_all(error, Attempt(overrides, trees, check)) or error
        if isinstance(explained, UserError):
            Sources(overrides, trees.roots, primary=trees.primary).annotate(explained)
        if explained is error:
            raise
        raise explained from error


def tree_roots(config_dirs: Sequence[Path]) -> list[Path]:
    """Return the directories of the trees, the user's own first."""
    return [*config_dirs, CONF_DIR]


def list_options(group: str, config_dirs: tuple[Path, ...] = ()) -> list[str]:
    """Return the choices of a configuration group, such as ``gpt3/126m`` of ``training``."""
    return options_of(group, tree_roots(config_dirs))
