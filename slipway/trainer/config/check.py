"""Hold a configuration against the table of keys."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from slipway.common.errors import UserError, suggest
from slipway.trainer.config.keys import (
    KEYS,
    LAUNCHER,
    T5_KEYS,
    Implemented,
    Irrelevant,
    Refused,
    Status,
    explain_misplaced,
    status_of,
)
from slipway.trainer.config.t5 import is_t5


def table_for(flat: Mapping[str, Any]) -> dict[str, Status]:
    """Return the table of the configuration's kind of model."""
    return T5_KEYS if is_t5(flat) else KEYS


def check_keys(flat: Mapping[str, Any]) -> None:
    """Refuse unknown keys and values that ask for missing features.

    Raises
    ------
    UserError
        For the first key that is unknown, or has a value that the table refuses.
    """
    table = table_for(flat)
    for key, value in flat.items():
        status = status_of(key, table)
        if status is None and value == {} and _is_node(key, table):
            continue
        if status is None:
            problem = explain_misplaced(key, table) or f"unknown key{suggest(key, table)}"
            raise UserError(f"{key}={value!r}: {problem}")
        if isinstance(status, Refused) and not any(_is_same(value, allowed) for allowed in status.allowed):
            valid = " or ".join("null" if allowed is None else str(allowed) for allowed in status.allowed)
            raise UserError(f"{key}={value!r}: {status.reason}; valid here: {valid}")


def find_unused(flat: Mapping[str, Any], cuda: bool) -> dict[str, str]:
    """Return the keys that change nothing here, with the reason; without those of the launcher.

    Parameters
    ----------
    cuda
        Whether there is a CUDA device.
    """
    reasons: dict[str, str] = {}
    table = table_for(flat)
    for key in flat:
        status = status_of(key, table)
        if isinstance(status, Irrelevant) and status is not LAUNCHER:
            reasons[key] = status.reason
        elif isinstance(status, Implemented) and status.on_cpu and not cuda:
            reasons[key] = status.on_cpu
    return reasons


def report_unused(unused: Mapping[str, str], overridden: Container[str], log: Path) -> list[str]:
    """Return a line for each unused key that the command line set, and one that counts the others."""
    own = [f"note: {key}: no effect here: {reason}" for key, reason in unused.items() if key in overridden]
    others = len(unused) - len(own)
    return [*own, *([f"{others} keys have no effect here: {log} lists them"] if others else [])]


def _is_node(key: str, table: Mapping[str, Status]) -> bool:
    return any(known.startswith(f"{key}.") for known in table)


def _is_same(value: Any, allowed: Any) -> bool:
    # In Python True == 1: a flag where a number belongs must not pass.
    if isinstance(value, bool) is not isinstance(allowed, bool):
        return False
    return bool(value == allowed)
