"""Values that are refused: secrets, which scripts and records would hold, and placeholders that were left."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from launcher.config.sources import Sources
from launcher.config.tree_composer import nodes
from launcher.errors import UserError, escape, setting, shortened
from launcher.secrecy import (
    MASK,
    Known,
    collect_known_values,
    hidden,
    is_exported,
    is_file_key,
    is_secret_key,
    is_secret_name,
    printable,
    referred_variables,
    secret_items,
    secrets_in,
)
from launcher.slurm.queue_flags import QueueFlags

# NeMo's nodes, which are written into the configuration of the launch.
NEMO_NODES = ("training.trainer", "training.exp_manager", "training.model")
# Options that Slurm shows to everybody who asks for the job.
_SHOWN_BY_SLURM = ("job_name_prefix", *(field.name for field in fields(QueueFlags)))
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def check_secrets(config: BaseModel) -> None:
    """Raise UserError for a secret among the values, with its key and an alternative."""
    known, values = collect_known_values(), list(values_of(config.model_dump(exclude_unset=True)))
    for key, value in values:
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            _check(key, value, known)
    for key, items in values:
        if isinstance(items, list | tuple):
            for secret in secret_items(items, known).values():
                raise _refusal(key, f"it has {secret.what}", secret.variable or _suggest_variable(key))


def check_references(references: Mapping[str, str]) -> None:
    """Raise UserError for a value that refers to a variable with a secret's name; see `secret_references`."""
    for key, variable in references.items():
        raise _refusal(key, f"it refers to the variable {variable}", variable)


def check_texts(texts: Mapping[Path, str], origin: str) -> None:
    """Raise UserError for a secret in a file that is to be written; its text comes from `origin`."""
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for secret in secrets_in(line):
                where = f"{origin}: line {number} of {path.name}"
                raise UserError(
                    f"{where}: a secret must not be written into a script: it has {secret.what}",
                    hint=_suggest_file(secret.variable or "A_TOKEN"),
                )


def secret_references(tree: DictConfig, resolved: Any) -> dict[str, str]:
    """Return the keys of values that refer to variables with a secret's name, and the variables.

    A reference with an empty result does not count: ``${oc.env:WANDB_API_KEY,null}`` with no such variable.
    """
    references: dict[str, str] = {}
    for path, written in nodes(OmegaConf.to_container(tree)):
        key = ".".join(map(str, path))
        if isinstance(written, str) and "oc.env" in written and not is_file_key(key):
            with contextlib.suppress(KeyError, IndexError, TypeError):
                if functools.reduce(operator.getitem, path, resolved) not in (None, ""):
                    references |= ((key, variable) for variable in referred_variables(written))
    return references


def values_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values and the lists of a configuration, each with its key; an item has that of its list."""
    for path, value in nodes(node):
        if not isinstance(value, dict):
            yield ".".join(str(part) for part in path if not isinstance(part, int)), value


def _check(key: str, value: str | int, known: Known) -> None:
    name = key.rpartition(".")[2]
    if is_secret_key(key) and not is_file_key(key):
        raise _refusal(key, None, _suggest_variable(key))
    # A name may be a secret as well: a mapping's keys are the user's.
    secrets = secrets_in(name, known=known)
    if isinstance(value, str):
        secrets += secrets_in(value, key, known=known)
    if secrets:
        variable = secrets[0].variable or _suggest_variable(key)
        listed = is_exported(str(value), key)
        further = f"if it is no secret: env_vars.{variable}=..." if listed else None
        raise _refusal(key, f"it has {secrets[0].what}", variable, further)


def _suggest_variable(key: str) -> str:
    """Return the variable that a key's value would be read from instead."""
    *parents, name = key.split(".")
    if "wandb_logger_kwargs" in (*parents, name):
        return "WANDB_API_KEY"
    if {"env_vars", "env_expand"} & {*parents}:
        return name
    return name.upper() if is_secret_name(name.upper()) and _NAME.fullmatch(name) else "A_TOKEN"


def _refusal(key: str, what: str | None, variable: str, further: str | None = None) -> UserError:
    """Say why a value is refused, without the value."""
    printed = printable(escape(key))
    file = "a configuration file" if key.startswith(NEMO_NODES) else "a script"
    if key.startswith("image."):
        file = "an image, which others may read"
    because = f": {what}" if what else ""
    if key.startswith(("cluster.", "stage_cluster.")) and key.rpartition(".")[2] in _SHOWN_BY_SLURM:
        because += "; Slurm shows it to everybody"
    return UserError(
        f"{printed}: a secret must not be written into {file}{because}",
        key=key,
        hint="\n".join(filter(None, [_suggest_file(variable), further])),
    )


def _suggest_file(variable: str) -> str:
    return f"keep it in a file that only you can read: env_files={{{variable}: /path/of/the/file}}"


# --- placeholders

# A placeholder in any value. Tokenizers have <s>, <mask> and <extra_id_0>, packages numpy<3.
_ANYWHERE = (
    r"<\s*(?i:your|insert|enter|replace|fill|put|path|change|add)(?![a-z])[^<>]*>",
    r"<[A-Za-z][\w.-]*(?: +[\w.-]+)+>",
    r"‹[^‹›]+›",
    r"(?<![A-Za-z0-9])(?i:(?:change|replace|edit|fill)[-_]?me)(?![A-Za-z0-9])",
    r"(?<![A-Za-z0-9])(?i:your)[-_][\w.-]+",
    r"(?:^|(?<=[/:,=]))/?path/to(?=/|$)",
)
# In our own keys, with names and paths as values.
_IN_NAMES = (
    r"<[A-Za-z][\w .-]{2,}>",
    r"\{\{\s*[\w. ]+?\s*\}\}",
    r"(?:^|(?<=/))(?:TODO|TBD|FIXME|X{3,8}|\.{3,}|…)(?=/|$)",
)
_CERTAIN = re.compile("|".join(_ANYWHERE))
_LIKELY = re.compile("|".join((*_ANYWHERE, *_IN_NAMES)))

# NeMo's nodes and variables hold text of any kind; in a comment a placeholder does no harm.
_FREE = re.compile(
    r"training\.(trainer|exp_manager|model)\.|(.*\.)?env_(vars|expand)\.|image\.env\.", re.DOTALL
)
_PROSE = re.compile(r".*\.(comment|notes|description)|image\.labels\..*", re.DOTALL)


class Placeholder(UserError):
    """A placeholder in the value of a key."""

    def __init__(self, key: str, value: str, text: str) -> None:
        what = "a placeholder, not a value"
        if hidden(key, value) != MASK and value.strip() != text:
            what = f"a placeholder was left in it: {shortened(escape(text))}"
        hint = f"put your own in its place: {escape(key)}=..."
        if key.startswith(("cluster.", "stage_cluster.")):
            hint += "; null leaves it out"
        super().__init__(f"{setting(key, value)}: {what}", key=key, hint=hint)
        self.text = text


def placeholders_in(node: Mapping[str, Any], sources: Sources) -> list[Placeholder]:
    """Return a mistake for each value with a placeholder, but not for references to one."""
    left = [
        Placeholder(key, value, text)
        for key, value in values_of(node)
        if isinstance(value, str) and (text := placeholder_in(key, value)) is not None
    ]
    if len(left) < 2:
        return left
    written = [mistake for mistake in left if _is_written_there(mistake, sources)]
    names = {mistake.text for mistake in written}
    return [mistake for mistake in left if mistake in written or mistake.text not in names]


def _is_written_there(mistake: Placeholder, sources: Sources) -> bool:
    text = sources.written(str(mistake.key), depth=0)
    return text is not None and (mistake.text in text or "oc.env" in text)


def placeholder_in(key: str, value: str) -> str | None:
    match = _LIKELY.search(value)
    if match and _FREE.match(key):
        match = _CERTAIN.search(value)
    return match[0] if match and not _PROSE.fullmatch(key) else None
