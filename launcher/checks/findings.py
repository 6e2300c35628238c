"""Findings: the results of checks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import one_line, shown
from launcher.estimates.values import full as full


class Severity(enum.Enum):
    """An error stops a launch, a warning is told; what was not looked at is `skipped`."""

    ERROR = "error"
    WARNING = "warning"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes
    ----------
    id
        The check that found it, as ``--no-check`` takes it: stable, such as ``layout.tensor``.
    key
        The key of the configuration to change first, such as ``training.model.global_batch_size``.
    fix
        What would be valid; several lines where there are several ways out.
    why
        Why a check was skipped, where that is known; the message has it too.
    """

    id: str
    severity: Severity
    key: str | None
    message: str
    fix: str | None = None
    also: tuple[str, ...] = ()
    why: str | None = None


def error(
    check: str, key: str, value: Any, text: str, fix: str | None = None, also: Sequence[str] = ()
) -> Finding:
    """Return an error whose message reads ``KEY=VALUE: what is wrong``."""
    return _finding(Severity.ERROR, check, key, value, text, fix, also)


def warning(
    check: str, key: str, value: Any, text: str, fix: str | None = None, also: Sequence[str] = ()
) -> Finding:
    return _finding(Severity.WARNING, check, key, value, text, fix, also)


def _finding(
    severity: Severity, check: str, key: str, value: Any, text: str, fix: str | None, also: Sequence[str]
) -> Finding:
    message = one_line(f"{full(key)}={shown(value)}: {text}")
    return Finding(check, severity, full(key), message, fix, tuple(full(other) for other in also))
