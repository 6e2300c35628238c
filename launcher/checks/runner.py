"""The checks are asked: what each finds, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import CHECKS, Check
from launcher.checks.rules.keys import TRAINER
from launcher.errors import UserError, did_you_mean
from launcher.plan import Plan

# What is looked at beside the keys: the trainer says nothing of these.
_OF_OTHERS = ("path.", "image.", "secret.", "cluster.", "memory.", "space.", "run.", "data.identity")


def run_checks(plan: Plan, facts: Facts, skipped: Sequence[str] = ()) -> list[Finding]:
    """Ask every check that is not to be skipped.

    Returns
    -------
    Errors first, then warnings, then what could not be looked at.
    """
    found = [finding for check in CHECKS if check.id not in skipped for finding in _ask(check, plan, facts)]
    if any(finding.severity is Severity.ERROR and _is_of_keys(finding) for finding in found):
        # The trainer stops at the first mistake, which is among the others.
        found = [finding for finding in found if finding.id != TRAINER]
    if any(finding.severity is not Severity.SKIPPED for finding in found):
        # Imported late: looking for layouts is a good part of this package, and most launches need none.
        from launcher.checks.remedies import add_remedies

        found = add_remedies(found, plan, facts)
    return worst_first(found)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors first, then warnings, then what was skipped."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _is_of_keys(finding: Finding) -> bool:
    """Return True for a finding that our trainer, which sees the keys alone, may have too."""
    return finding.id != TRAINER and not finding.id.startswith(_OF_OTHERS)


def require_known(ids: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse ids that no check has, nor the `others` that a verb looks at beside the checks.

    Raises
    ------
    UserError
        With the nearest id.
    """
    known = [*(check.id for check in CHECKS), *others]
    for name in ids:
        if name not in known:
            text = f"--no-check={name}: there is no such check"
            raise UserError(text, hint=did_you_mean(name, known))


def is_applicable(check: Check, facts: Facts) -> bool:
    """Return True if a check has something to look at, or is reported as skipped."""
    return all(_part(facts, name) is not _NOT_NEEDED for name in check.needs)


def has_all(check: Check, facts: Facts) -> bool:
    """Return True if each fact that a check needs is there."""
    return all(_part(facts, name) is None for name in check.needs)


class _Missing(NamedTuple):
    """The reason why a check has no input; ``None`` where nobody asked for it."""

    why: str | None


_NOT_NEEDED = _Missing(None)
_UNKNOWN = _Missing("")


def _ask(check: Check, plan: Plan, facts: Facts) -> Iterable[Finding]:
    parts = [_part(facts, name) for name in check.needs]
    if _NOT_NEEDED in parts:
        return ()
    missing = [part for part in parts if part is not None]
    if missing:
        why = missing[0].why
        text = f"not checked: {check.tells}" + (f" ({why})" if why else "")
        return [Finding(check.id, Severity.SKIPPED, None, text, why=why or None)]
    return check.find(plan, facts)


def _part(facts: Facts, name: str) -> _Missing | None:
    """Return why a fact is missing; None if it is there."""
    whole, dot, part = name.partition(".")
    found = getattr(facts, whole)
    if not dot:
        return _UNKNOWN if found is None else None
    if found is None:
        return _NOT_NEEDED
    if getattr(found, part) is not None:
        return None
    return _Missing(found.missing[part]) if part in found.missing else _NOT_NEEDED
