"""The table of checks in their order, and its application to a plan and its facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.findings import Check, Finding, Severity
from launcher.checks.rules import (
    accounts,
    cluster,
    cluster_nodes,
    files,
    images,
    keys,
    launch,
    layout,
    model,
    partitions,
    resources,
    runs,
    space,
    training,
)
from launcher.checks.rules.keys import TRAINER
from launcher.errors import UserError, did_you_mean
from launcher.plan import Plan

# The checks in the order in which they are applied and their findings reported.
CHECKS: tuple[Check[...], ...] = (
    *(*keys.TYPES, *layout.CHECKS, *resources.CHECKS, *model.MEMORY, *training.BATCHES, *model.CHECKS),
    *(*training.CHECKS, *runs.TIMES, *keys.CHECKS, *runs.CHECKS, *files.CHECKS),
    *(*images.CHECKS, *space.CHECKS),
    *(*cluster.PARTITIONS, *cluster_nodes.CHECKS, *accounts.CHECKS, *partitions.CHECKS, *cluster.CHECKS),
    *launch.CHECKS,
)
# The trainer does not report on these parts, which the checks examine apart from the keys.
_OF_OTHERS = (
    *("path.", "image.", "secret.", "cluster.", "memory.", "space.", "run."),
    *("data.identity", "data.tokenizer", TRAINER),
)


# The ids of a site's own checks, which are known once its tree is read.
SITE = "site."


def require_known(ids: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse ids that are neither a check's nor among the `others`, which a verb examines too."""
    known = [*(check.id for check in CHECKS), *others]
    for name in ids:
        if name not in known and not name.startswith(SITE):
            text = f"--no-check={name}: there is no such check"
            raise UserError(text, hint=did_you_mean(name, known))


def run_checks(plan: Plan, facts: Facts, skipped: Sequence[str] = ()) -> list[Finding]:
    """Apply all checks except skipped ones; return their findings, the worst first."""
    checks = [check for check in CHECKS if check.id not in skipped]
    findings = [finding for check in checks for finding in check.apply(plan, facts)]
    if any(
        finding.severity is Severity.ERROR and not finding.id.startswith(_OF_OTHERS) for finding in findings
    ):
        # Our trainer, which sees the keys alone, stops at the first mistake, which is among the others.
        findings = [finding for finding in findings if finding.id != TRAINER]
    if any(finding.severity in (Severity.ERROR, Severity.WARNING) for finding in findings):
        # Imported late: the search for layouts is large, and most launches do not need it.
        from launcher.checks.remedies import REMEDIES

        findings = [
            replace(finding, fix=REMEDIES[finding.id](plan, facts))
            if finding.id in REMEDIES and finding.fix is None and finding.severity is not Severity.SKIPPED
            else finding
            for finding in findings
        ]
    if facts.cluster is not None:
        tasks = facts.array_tasks
        findings = [partitions.add_partitions(finding, plan, facts.cluster, tasks) for finding in findings]
    return sort_by_severity(findings)


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings: errors, warnings, skipped checks."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
