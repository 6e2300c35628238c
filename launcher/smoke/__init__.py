"""Two steps of a training's real payload on one node, before it is launched on all of them.

The smoke is a launch of a run of its own, ``<run>_smoke``, planned from the same overrides and a few more
(`launcher.smoke.shrinking`), and launched the ordinary way. What it finds wrong has cost one node and
minutes, not a hundred nodes and a night in the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.checks.gate import inspect_draft, refuse
from launcher.checks.gathering.host import check_host
from launcher.drafting import Draft, Request, draft
from launcher.errors import UserError
from launcher.launching import Launched, launch
from launcher.monitor.evidence import gather
from launcher.monitor.verification import RunCheck, verify_smoke
from launcher.schedulers import scheduler_for
from launcher.smoke.shrinking import shrink

# The schedule of a whole training does not fit into two steps, and need not: its first two are the same.
_OF_WHOLE_TRAININGS = ("schedule.warmup", "schedule.validation")


@dataclass(frozen=True, slots=True)
class Smoke:
    """A smoke that is planned, and nowhere written yet; `told` says how it differs from the launch."""

    made: Draft
    request: Request
    told: Sequence[str]


def plan_smoke(made: Draft, request: Request, skipped: Sequence[str] = ()) -> Smoke:
    """Plan the smoke of a launch; nothing is written.

    Parameters
    ----------
    skipped
        The ids of checks that are not asked.

    Raises
    ------
    UserError
        If one node cannot hold the layout, or the launch is no training.
    """
    try:
        shrunk = shrink(made)
    except UserError as error:
        made.composition.annotate(error)
        raise
    smaller = replace(request, overrides=[*request.overrides, *shrunk.overrides])
    smoke = draft(smaller)
    refuse(smoke, inspect_draft(smoke, [*skipped, *_OF_WHOLE_TRAININGS]))
    return Smoke(smoke, smaller, shrunk.told)


def judge(draft: Draft) -> None:
    """Let this machine and the scheduler judge the launch itself, before its smoke takes its time.

    Raises
    ------
    UserError
        If the launch would be refused.
    """
    check_host(draft)
    scheduler_for(draft.plan.scheduler, draft.plan.slurm_conf).validate(draft.rendered.script)


def launch_smoke(smoke: Smoke) -> Launched:
    """Launch the smoke as any run is launched."""
    return launch(smoke.made, smoke.request)


def checks_of(launched: Launched) -> list[RunCheck]:
    """What a smoke that ended says: `launcher.monitor.verification`."""
    return verify_smoke(gather(launched.paths.run_dir, launched.paths.number).evidence)
