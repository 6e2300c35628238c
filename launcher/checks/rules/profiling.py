"""Which ranks are profiled."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.findings import Finding, error
from launcher.estimates.parallelism import NODES
from launcher.estimates.values import count
from launcher.plan import Plan

_RANKS = "model.nsys_profile.ranks"


def rank_problems(plan: Plan) -> Iterator[Finding]:
    """Ranks that a profile is wanted of are those of tasks."""
    profile, tasks = plan.job.profile, plan.job.resources.tasks
    if profile is None:
        return
    beyond = [rank for rank in profile.ranks if rank >= tasks]
    if beyond:
        told = f"there is no rank {beyond[0]} among {count(tasks, 'task')}"
        yield error("profile.ranks", _RANKS, list(profile.ranks), told, f"ranks 0 to {tasks - 1}", (NODES,))
