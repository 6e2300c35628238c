"""Read the fully interpolated YAML that the launcher writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest

ROOTS = ("run", "trainer", "exp_manager", "model", "resume", "restore_from_path")
# Those that are values themselves, as NeMo has them.
_VALUES = ("restore_from_path",)


def load_config(directory: Path, name: str, *others: str) -> dict[str, Any]:
    """Load ``directory/name`` (``.yaml`` may be left out).

    Parameters
    ----------
    others
        Further root keys, which the file must have.

    Returns
    -------
    dict
        The nested configuration with the root keys ``run``, ``trainer``, ``exp_manager`` and ``model``, our
        own ``resume``, and the others.

    Raises
    ------
    UserError
        If the file is missing, is not YAML, or has other root keys.
    """
    path = directory / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    config = load_yaml(path)
    _check_roots(path, config, others)
    return dict(config)


def load_yaml(path: Path) -> Any:
    """Load a file.

    Raises
    ------
    UserError
        If it is missing, or is not YAML.
    """
    # Not at the top: an interpreter without it was refused before this.
    import yaml

    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}", found_by="node") from None
    try:
        return yaml.safe_load(content.decode())
    # ValueError: bytes that are no text, and impossible dates such as 2026-13-01.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"configuration {path} is not valid YAML: {error}") from None


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into dotted keys; lists stay values, and mappings without keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (value or not prefix):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _check_roots(path: Path, config: object, others: tuple[str, ...]) -> None:
    roots = (*ROOTS, *others)
    if not isinstance(config, dict):
        raise UserError(f"configuration {path}: expected a mapping with the keys {', '.join(roots)}")
    for key, value in config.items():
        if key not in roots:
            hint = suggest(str(key), roots)
            raise UserError(
                f"configuration {path}: unknown root key '{key}'; valid are {', '.join(roots)}{hint}"
            )
        if not isinstance(value, dict) and key not in _VALUES:
            raise UserError(f"configuration {path}: '{key}' must be a mapping, not {value!r}")
    missing = [root for root in ("trainer", "exp_manager", "model", *others) if root not in config]
    if missing:
        raise UserError(f"configuration {path}: missing root key '{missing[0]}'")
