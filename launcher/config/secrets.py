"""Secrets in a configuration: what has one is refused, because scripts and records would hold its value."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, Node
from pydantic import BaseModel

from launcher.errors import UserError, one_line
from launcher.secrecy import (
    Known,
    is_export_key,
    is_file_key,
    is_secret_key,
    is_secret_name,
    known_values,
    printable,
    referred_variables,
    secrets_in,
)

_VARIABLE_OF = {"wandb_logger_kwargs": "WANDB_API_KEY"}
# NeMo's nodes, which are written into the configuration of the launch.
_IN_CONFIGURATION = ("training.trainer", "training.exp_manager", "training.model")
# What Slurm shows to all who ask for the job.
_SHOWN_BY_SLURM = ("comment", "job_name_prefix", "mail_user", "licenses", "account", "reservation")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def check_secrets(config: BaseModel) -> None:
    """Refuse a configuration with a secret among its values.

    Raises
    ------
    UserError
        Naming the key, and what is to be given in place of the value.
    """
    known = known_values()
    for key, value in _leaves(config.model_dump(exclude_unset=True)):
        _check(key, value, known)


def check_references(references: Mapping[str, str]) -> None:
    """Refuse a configuration whose values refer to variables with a secret's name; see `secret_references`.

    Raises
    ------
    UserError
        Naming the key, the variable, and what is to be given in place of the reference.
    """
    for key, variable in references.items():
        raise _refusal(key, f"it refers to the variable {variable}", variable)


def check_texts(texts: Mapping[Path, str], origin: str) -> None:
    """Refuse files that are to be written and have a secret, though the configuration has none.

    Parameters
    ----------
    origin
        What the text comes from: templates of the user's own.

    Raises
    ------
    UserError
        Naming the file and the line.
    """
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            secrets = secrets_in(line)
            if secrets:
                where = f"{origin}: line {number} of {path.name}"
                raise UserError(
                    f"{where}: a secret must not be written into a script: it has {secrets[0].what}",
                    hint=_in_a_file(secrets[0].variable or "A_TOKEN"),
                )


def secret_references(tree: DictConfig, resolved: Any) -> dict[str, str]:
    """Return the keys of a tree whose values refer to variables with a secret's name, and the variables.

    A reference that comes to nothing is none: ``${oc.env:WANDB_API_KEY,null}`` where that is not set.

    Parameters
    ----------
    tree
        The composed tree, as OmegaConf has it.
    resolved
        The same with plain values.
    """
    return dict(_references(tree, resolved, ()))


def _references(node: Node, resolved: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    content = node._value()  # as it was written
    if isinstance(content, (dict, list)):
        for name, child in content.items() if isinstance(content, dict) else enumerate(content):
            with contextlib.suppress(KeyError, IndexError, TypeError):
                yield from _references(child, resolved[name], (*path, str(name)))
    elif isinstance(content, str) and "oc.env" in content and resolved not in (None, ""):
        key = ".".join(path)
        if not is_file_key(key):
            yield from ((key, variable) for variable in referred_variables(content))


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Find the texts and numbers of a configuration, each with its key; a list's have that of the list."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _leaves(value, path)
    elif isinstance(node, (str, int)) and not isinstance(node, bool) and node != "":
        yield ".".join(path), node


def _check(key: str, value: str | int, known: Known) -> None:
    name = key.rpartition(".")[2]
    if is_secret_key(key) and not is_file_key(key):
        raise _refusal(key, None, _variable_of(key))
    # A name may be a secret as well: a mapping's keys are the user's.
    secrets = secrets_in(name, known=known)
    listed = is_export_key(key)
    if isinstance(value, str):
        secrets += secrets_in(value, exported=listed, known=known)
        listed |= "--export" in value
    if secrets:
        variable = secrets[0].variable or _variable_of(key)
        further = f"what is no secret: env_vars.{variable}=..." if listed else None
        raise _refusal(key, f"it has {secrets[0].what}", variable, further)


def _variable_of(key: str) -> str:
    """Return the variable that a key's value would be read from instead."""
    path = key.split(".")
    variable = next((_VARIABLE_OF[part] for part in path if part in _VARIABLE_OF), None)
    if variable is not None or any(part == "env_vars" for part in path[:-1]):
        return variable or path[-1]
    name = path[-1].upper()
    return name if is_secret_name(name) and _NAME.fullmatch(name) else "A_TOKEN"


def _refusal(key: str, what: str | None, variable: str, further: str | None = None) -> UserError:
    """Say why a value is refused, without the value."""
    printed = printable(one_line(key))
    file = "a configuration file" if key.startswith(_IN_CONFIGURATION) else "a script"
    if key.startswith("image."):
        file = "an image, which others may read"
    because = f": {what}" if what else ""
    if key.startswith(("cluster.", "stage_cluster.")) and key.rpartition(".")[2] in _SHOWN_BY_SLURM:
        because += "; Slurm shows it to everybody"
    return UserError(
        f"{printed}: a secret must not be written into {file}{because}",
        key=key,
        hint="\n".join(filter(None, [_in_a_file(variable), further])),
    )


def _in_a_file(variable: str) -> str:
    return f"keep it in a file that only you can read: env_files={{{variable}: /path/of/the/file}}"
