"""A draft is checked: facts are gathered, the checks asked, and what they find is told as mistakes are."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.checks.findings import Finding, Severity
from launcher.checks.gathering.gather import ClusterOf, gather
from launcher.checks.runner import run_checks
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError

__all__ = ["as_mistakes", "gather", "inspect_draft", "refuse"]


def inspect_draft(
    made: Draft, skipped: Sequence[str], *, look: bool = True, cluster_of: ClusterOf | None = None
) -> list[Finding]:
    """Check a draft.

    Parameters
    ----------
    skipped
        The ids of checks that are not asked.
    look
        Look at files other than those of the configuration too; a dry run does not.
    cluster_of
        Tells what the cluster says, where it is asked for several drafts.
    """
    return run_checks(made.plan, gather(made, look=look, cluster_of=cluster_of), skipped)


def refuse(made: Draft, findings: Sequence[Finding]) -> None:
    """Let the errors among the findings stop a launch.

    Raises
    ------
    Mistakes
        All of them together, each with where its values are from.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise Mistakes(as_mistakes(made, errors))


def as_mistakes(made: Draft, findings: Sequence[Finding]) -> list[UserError]:
    """Findings in the layout of mistakes, with the sources of their keys."""
    told = [
        UserError(f"{finding.message} [{finding.id}]", key=finding.key, also=finding.also, hint=finding.fix)
        for finding in findings
    ]
    if told:
        made.composition.annotate(Mistakes(told))
    return told
