"""The checks are applied: what each finds, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.findings import REMEDIES, Finding, Severity
from launcher.checks.registry import CHECKS
from launcher.checks.rules.keys import TRAINER
from launcher.plan import Plan

# What is looked at beside the keys: the trainer says nothing of these.
_OF_OTHERS = ("path.", "image.", "secret.", "cluster.", "memory.", "space.", "run.", "data.identity", TRAINER)


def run_checks(plan: Plan, facts: Facts, skipped: Sequence[str] = ()) -> list[Finding]:
    """Apply every check that is not to be skipped, and return what they find, the worst first."""
    checks = [check for check in CHECKS if check.id not in skipped]
    findings = [finding for check in checks for finding in check.apply(plan, facts)]
    if any(
        finding.severity is Severity.ERROR and not finding.id.startswith(_OF_OTHERS) for finding in findings
    ):
        # Our trainer, which sees the keys alone, stops at the first mistake, which is among the others.
        findings = [finding for finding in findings if finding.id != TRAINER]
    if any(finding.severity is not Severity.SKIPPED for finding in findings):
        # Imported late: looking for layouts is a good part of this package, and most launches need none.
        import launcher.checks.remedies  # noqa: F401 - enters them into their table

        findings = [_remedied(finding, plan, facts) for finding in findings]
    return worst_first(findings)


def _remedied(finding: Finding, plan: Plan, facts: Facts) -> Finding:
    """Return a finding with the remedy of its check, unless it names its own."""
    find_remedy = REMEDIES.get(finding.id)
    if find_remedy is None or finding.fix is not None or finding.severity is Severity.SKIPPED:
        return finding
    return replace(finding, fix=find_remedy(plan, facts))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors first, then warnings, then what was skipped."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
