"""Secrets that would reach a script or a configuration file: such a launch is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.config.schema import ClusterConfig, TrainingConfig
from launcher.errors import UserError, one_line
from launcher.secrecy import exported_secrets, is_secret_name

_VARIABLE_OF = {"wandb_logger_kwargs": "WANDB_API_KEY"}


def secret_in_script(key: str, variable: str) -> UserError:
    """What is said of a secret, whose value is not part of it."""
    return UserError(
        f"{one_line(key)}: a secret must not be written into a script",
        key=key,
        hint=f"keep it in a file that only you can read: env_files={{{variable}: /path/of/the/file}}",
    )


def check_exports(cluster: ClusterConfig) -> None:
    """Refuse variables that are secrets among the flags of sbatch and of srun.

    Raises
    ------
    UserError
        Naming the flag and the variable.
    """
    flags = [(f"cluster.sbatch.{flag}", value) for flag, value in cluster.sbatch.items()]
    for key, value in (*flags, *(("cluster.srun_args", text) for text in cluster.srun_args)):
        names = exported_secrets(value) if isinstance(value, str) else []
        if names:
            raise UserError(
                f"{key}: a secret must not be written into a script: {names[0]}",
                key=key,
                hint=secret_in_script(key, names[0]).hint,
            )


def check_nodes(training: TrainingConfig) -> None:
    """Refuse secrets among NeMo's keys, which are written into the launch's configuration.

    Raises
    ------
    UserError
        Naming the key.
    """
    for name in ("trainer", "exp_manager", "model"):
        for path in _secrets(getattr(training, name), ("training", name)):
            key = ".".join(path)
            variable = next((_VARIABLE_OF[part] for part in path if part in _VARIABLE_OF), path[-1].upper())
            raise UserError(
                f"{one_line(key)}: a secret must not be written into a configuration file",
                key=key,
                hint=secret_in_script(key, variable).hint,
            )


def _secrets(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _secrets(value, (*path, str(name)))
    elif isinstance(node, list):
        for value in node:
            yield from _secrets(value, path)
    elif isinstance(node, str) and node and is_secret_name(path[-1]):
        yield path
