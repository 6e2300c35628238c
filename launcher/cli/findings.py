"""What checks find, on the command line: shared by the verbs that check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launcher.drafting import Draft
from launcher.errors import UserError
from launcher.inspection import as_mistakes, inspect_draft, refuse
from launcher.preflight.findings import Severity
from launcher.preflight.registry import require_known

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


def stop_at_errors(made: Draft, skipped: Sequence[str], *, look: bool) -> None:
    """Check a draft before anything is written: warnings are told, errors stop it.

    Raises
    ------
    UserError
        All errors together.
    """
    _refuse_to_skip(skipped)
    require_known(skipped)
    findings = inspect_draft(made, skipped, look=look)
    warnings = [finding for finding in findings if finding.severity is Severity.WARNING]
    for warning in as_mistakes(made, warnings) if warnings else ():
        print(f"slipway: warning: {warning}", file=sys.stderr)
    refuse(made, findings)


def _refuse_to_skip(skipped: Sequence[str]) -> None:
    """A launch does not go past this machine and the scheduler; `slipway check` may."""
    for name in (MACHINE, SCHEDULER):
        if name in skipped:
            raise UserError(
                f"--no-check={name}: a launch always looks at that",
                hint=f"slipway check --no-check={name} leaves it out; launch --dry-run looks at neither of"
                f" {MACHINE} and {SCHEDULER}",
            )
