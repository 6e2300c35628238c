"""The checks are applied: what each finds, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.registry import CHECKS
from launcher.checks.rules.keys import TRAINER
from launcher.plan import Plan

# What is looked at beside the keys: the trainer says nothing of these.
_OF_OTHERS = ("path.", "image.", "secret.", "cluster.", "memory.", "space.", "run.", "data.identity", TRAINER)


def run_checks(plan: Plan, facts: Facts, skipped: Sequence[str] = ()) -> list[Finding]:
    """Apply every check that is not to be skipped, and return what they find, the worst first."""
    found = [finding for check in CHECKS if check.id not in skipped for finding in check.apply(plan, facts)]
    if any(finding.severity is Severity.ERROR and not finding.id.startswith(_OF_OTHERS) for finding in found):
        # Our trainer, which sees the keys alone, stops at the first mistake, which is among the others.
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
