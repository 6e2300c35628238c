"""Overrides to a checked configuration, with Hydra's compose API.

Hydra's `@hydra.main` would compose twice, change the working directory's meaning and own the exit code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from launcher.config.resolvers import register_resolvers
from launcher.config.schema import RunConfig, parse
from launcher.config.search_path import register_tree
from launcher.errors import UserError, did_you_mean

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"

# Each stage has a configuration group of its own name.
STAGES = ("data_preparation", "training")

# Relative paths start where the user stands; a job starts elsewhere.
_PATH_KEYS = ("launcher_scripts_path", "data_dir", "base_results_dir")

# NeMo's own nodes may be given keys that our tree does not show.
_PASS_THROUGH = ("training.trainer", "training.exp_manager", "training.model")

# Mappings whose keys are the user's own: a new key needs no `+`.
_OPEN_NODES = ("env_vars.", "env_vars=")


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed and checked configuration.

    Attributes
    ----------
    config
        The checked form.
    choices
        The option chosen in each group, such as ``{"training": "gpt3/126m"}``.
    overrides
        What the user asked for, as given.
    """

    config: RunConfig
    choices: dict[str, str]
    overrides: tuple[str, ...]


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composition:
    """Compose the configuration tree and check it.

    Parameters
    ----------
    overrides
        Hydra's overrides, such as ``training=gpt3/5b`` or ``cluster.partition=gpu``.
    config_dir
        A tree of the user's own, looked at before ours.

    Raises
    ------
    UserError
        If an override is not understood, or a value is missing or not valid.
    """
    register_resolvers()
    if config_dir is not None and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir}: no such directory")
    register_tree(config_dir)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"), _hydra_errors(overrides, config_dir):
        tree = _compose_tree(overrides)
        choices = dict(tree.hydra.runtime.choices)
        node = _plain(tree)
    return Composition(
        config=parse(RunConfig, node),
        choices={group: choice for group, choice in choices.items() if group in node and choice},
        overrides=tuple(overrides),
    )


def _compose_tree(overrides: Sequence[str]) -> DictConfig:
    user = [_open(override) for override in overrides]
    skipped = [f"~{stage}" for stage in STAGES if stage not in _requested_stages(overrides)]
    return hydra_compose("config", overrides=[*user, *skipped], return_hydra_config=True)


def _open(override: str) -> str:
    return f"++{override}" if override.startswith(_OPEN_NODES) else override


def _requested_stages(overrides: Sequence[str]) -> list[str]:
    """Read the stages from the overrides: which groups to compose depends on them."""
    requested = ["training"]
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "stages":
            requested = re.findall(r"[\w-]+", value)
    if not requested:
        raise UserError("stages=[]: no stage is asked for", hint=f"valid: {', '.join(STAGES)}")
    for stage in requested:
        if stage not in STAGES:
            raise UserError(f"stages={stage}: there is no such stage", hint=did_you_mean(stage, STAGES))
    return requested


def _plain(tree: DictConfig) -> dict[str, Any]:
    """Resolve every interpolation, with the paths made absolute beforehand."""
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    for key in _PATH_KEYS:
        if tree[key] is None:
            raise UserError(f"{key}=null: a directory is needed")
        tree[key] = str(Path(str(tree[key])).expanduser().absolute())
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        missing = sorted(OmegaConf.missing_keys(tree))
        raise UserError(f"{missing[0]}: a value is needed", hint=f"give one: {missing[0]}=...") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@contextmanager
def _hydra_errors(overrides: Sequence[str], config_dir: Path | None) -> Iterator[None]:
    """Turn what Hydra and OmegaConf say of the user's input into errors that help."""
    try:
        yield
    except MissingConfigException as error:
        raise _missing_option(error, config_dir) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _unknown_key(error, overrides) or _as_told(error) from error
    except ValueError as error:
        if "Config group override" not in str(error):
            raise
        raise UserError(f"{' '.join(overrides)}: a group needs a choice, such as cluster=bcm") from error


def _as_told(error: Exception) -> UserError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(lines[0], hint=" ".join(lines[1:3]) or None)


def _unknown_key(error: Exception, overrides: Sequence[str]) -> UserError | None:
    """Name the nearest keys, found by composing once more without the override that failed."""
    found = re.match(r"Could not override '([^']+)'", str(error))
    if not found:
        return None
    key = found.group(1)
    parent, _, name = key.rpartition(".")
    # Group choices alone: another override may be a mistake too.
    choices = [override for override in overrides if re.match(r"[a-z_]+=[\w/.-]+$", override)]
    try:
        tree = _compose_tree([text for text in choices if text.partition("=")[0] != key])
    except HydraException:
        return None
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig):
        return UserError(f"{key}: there is no such key: {parent} holds no keys")
    valid = [str(child) for child in node if child != "hydra"]
    hint = did_you_mean(name, valid) or "it holds no keys yet"
    if parent.startswith(_PASS_THROUGH):
        hint += f" To hand it to NeMo all the same: +{key}=..."
    return UserError(f"{key}: there is no such key", hint=hint)


def _missing_option(error: MissingConfigException, config_dir: Path | None) -> UserError:
    group, _, option = (error.missing_cfg_file or "").partition("/")
    options = list_options(group, config_dir)
    if not options:
        return UserError(str(error).splitlines()[0])
    family = option.split("/")[0]
    near = [name for name in options if name.startswith(f"{family}/")] or options
    return UserError(f"{group}={option}: there is no such choice", hint=_near_or_list(option, near))


def _near_or_list(option: str, options: list[str]) -> str:
    hint = did_you_mean(option, options)
    listing = f"{', '.join(sorted(options))}"
    return f"{hint} valid: {listing}" if hint and hint.startswith("did") else f"valid: {listing}"


def list_options(group: str, config_dir: Path | None = None) -> list[str]:
    """The choices of a configuration group, such as ``gpt3/126m`` of ``training``."""
    roots = [root / group for root in (config_dir, CONF_DIR) if root is not None]
    files = [(path, root) for root in roots if root.is_dir() for path in root.rglob("*.yaml")]
    names = {str(path.relative_to(root).with_suffix("")) for path, root in files if path.name[0] != "_"}
    return sorted(names)
