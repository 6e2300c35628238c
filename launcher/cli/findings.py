"""What checks find, on the command line: shared by the verbs that check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launcher.checks.findings import Severity
from launcher.checks.gate import as_mistakes, inspect_draft, refuse
from launcher.checks.runner import require_known
from launcher.drafting import Draft
from launcher.errors import Mistakes, UserError

# What is looked at beside the checks, which are pure functions of the plan: what this machine has, and what
# the scheduler says.
MACHINE = "machine"
SCHEDULER = "scheduler"


def add_no_check(parser: argparse.ArgumentParser) -> None:
    """Add the option that skips checks."""
    parser.add_argument(
        "--no-check",
        action="append",
        default=[],
        metavar="ID",
        help="skip a check, such as layout.gpus; may be given again. docs/checks.md has them all",
    )


def stop_at_errors(made: Sequence[Draft], skipped: Sequence[str], *, look: bool) -> None:
    """Check drafts before anything is written: warnings are told, errors stop all of them.

    Raises
    ------
    UserError
        All errors together.
    """
    refuse_to_skip(skipped)
    require_known(skipped)
    errors: list[UserError] = []
    cluster_of = None
    if look and len(made) > 1:  # imported late: a dry run asks no cluster, and one stage asks once
        from launcher.checks.gathering.cluster import remembered

        cluster_of = remembered()
    for one in made:
        findings = inspect_draft(one, skipped, look=look, cluster_of=cluster_of)
        warnings = [finding for finding in findings if finding.severity is Severity.WARNING]
        for warning in as_mistakes(one, warnings) if warnings else ():
            print(f"slipway: warning: {warning}", file=sys.stderr)
        try:
            refuse(one, findings)
        except Mistakes as error:
            errors += error.mistakes
    if errors:
        raise Mistakes(errors)


def refuse_to_skip(skipped: Sequence[str]) -> None:
    """A launch does not go past this machine and the scheduler; `slipway check` may."""
    for name in (MACHINE, SCHEDULER):
        if name in skipped:
            raise UserError(
                f"--no-check={name}: a launch always looks at that",
                hint=f"slipway check --no-check={name} leaves it out; launch --dry-run looks at neither of"
                f" {MACHINE} and {SCHEDULER}",
            )
