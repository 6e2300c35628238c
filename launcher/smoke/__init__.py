"""Two steps of a training's real payload on one node, before it is launched on all of them.

The smoke is a launch of a run of its own, ``<run>_smoke``, planned from the same overrides and a few more
(`launcher.smoke.shrinking`), and launched the ordinary way. What it finds wrong has cost one node and
minutes, not a hundred nodes and a night in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.checks.gate import CheckReport, check_drafts, require_passed
from launcher.checks.rules.files import MACHINE
from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.launching import Launched, launch
from launcher.monitor.evidence import gather
from launcher.monitor.verification import RunCheck, verify_smoke
from launcher.smoke.shrinking import shrink

# The schedule of a whole training does not fit into two steps, and need not: its first two are the same.
_OF_WHOLE_TRAININGS = ("schedule.warmup", "schedule.validation")


@dataclass(frozen=True, slots=True)
class Smoke:
    """A smoke that is planned, and nowhere written yet; `told` says how it differs from the launch."""

    report: CheckReport
    request: Request
    summary: Sequence[str]

    @property
    def draft(self) -> Draft:
        """The draft of the smoke."""
        return self.report.draft


def plan_smoke(drafted: Draft, request: Request, skipped: Sequence[str] = ()) -> Smoke:
    """Plan the smoke of a launch; nothing is written.

    Raises
    ------
    UserError
        If one node cannot hold the layout, or the launch is no training.
    """
    try:
        shrunk = shrink(drafted)
    except UserError as error:
        drafted.composition.annotate(error)
        raise
    smaller = replace(request, overrides=[*request.overrides, *shrunk.overrides])
    smoke = draft(smaller)
    # This machine is looked at for the launch itself.
    (report,) = check_drafts([smoke], [*skipped, *_OF_WHOLE_TRAININGS, MACHINE])
    require_passed([report])
    return Smoke(report, smaller, shrunk.summary)


def launch_smoke(smoke: Smoke) -> Launched:
    """Launch the smoke as any run is launched."""
    return launch(smoke.draft, smoke.request, report=smoke.report)


def checks_of(launched: Launched) -> list[RunCheck]:
    """Return the verification of a smoke that ended: `launcher.monitor.verification`."""
    return verify_smoke(gather(launched.paths.run_dir, launched.paths.number).evidence)
