"""The cluster that a job goes to, as it is now: asked where Slurm is the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from launcher.checks.facts import Facts
from launcher.checks.rules.cluster import chosen
from launcher.plan import Plan
from launcher.runs.provenance import user
from launcher.slurm.cluster import ClusterFacts
from launcher.slurm.questions import ask_at_once, facts_of, questions

ClusterOf = Callable[[Plan], ClusterFacts | None]


def cluster_facts(plan: Plan) -> ClusterFacts | None:
    """Ask the cluster what it has and what it allows; ``None`` where the job does not go to a Slurm."""
    if plan.scheduler != "slurm":
        return None
    commands = questions(plan.job.queue.partition, user())
    if plan.job.container is None:
        del commands["pyxis"]
    found = facts_of(ask_at_once(commands, plan.slurm_conf), of_default=plan.job.queue.partition is None)
    return _without_hidden_nodes(plan, found)


def _without_hidden_nodes(plan: Plan, found: ClusterFacts) -> ClusterFacts:
    """Drop the nodes where Slurm hides them (``PrivateData=nodes``): none shown is not none there."""
    mine = chosen(plan, Facts(cluster=found))
    hidden = [one for one in mine if one.total_nodes and not (found.nodes or {}).get(one.name)]
    if found.nodes is None or not mine or len(hidden) < len(mine):
        return found
    missing = {**found.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(found, nodes=None, gpu_types=None, missing=missing)


def remembered(ask: ClusterOf = cluster_facts) -> ClusterOf:
    """Return a function that asks once for all plans with the same questions: the points of a sweep."""
    known: dict[tuple[object, ...], ClusterFacts | None] = {}

    def cluster_of(plan: Plan) -> ClusterFacts | None:
        key = (plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None)
        if key not in known:
            known[key] = ask(plan)
        return known[key]

    return cluster_of
