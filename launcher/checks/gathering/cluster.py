"""The cluster that a job goes to, asked what it has and what it allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.checks.gathering import gathers
from launcher.checks.rules.cluster import ClusterRequest
from launcher.drafting import Draft
from launcher.plan import Plan
from launcher.runs.provenance import user
from launcher.slurm.cluster import ClusterFacts

if TYPE_CHECKING:
    from launcher.slurm.questions import Reply


def ask_cluster(plan: Plan, parts: Iterable[str]) -> tuple[Mapping[str, Reply], ClusterFacts]:
    """Ask the cluster about parts of it; return the answers, and what they say."""
    # Imported late: a dry run does not look, and need not know how to run a cluster's commands.
    from launcher.slurm.questions import ask_at_once, facts_of, questions

    known = questions(plan.job.queue.partition, user())
    replies = ask_at_once({part: known[part] for part in parts}, plan.slurm_conf)
    return replies, facts_of(replies, of_default=plan.job.queue.partition is None)


def cluster_facts(plan: Plan) -> ClusterFacts | None:
    """Ask the cluster what it has and what it allows; ``None`` where the job does not go to a Slurm."""
    if plan.scheduler != "slurm":
        return None
    parts = ["settings", "partitions", "nodes", "associations", "qos"]
    _, cluster = ask_cluster(plan, parts if plan.job.container is None else [*parts, "pyxis"])
    # Where Slurm hides the nodes (``PrivateData=nodes``), none shown is not none there.
    mine = ClusterRequest(plan, cluster).partitions
    is_hidden = [each.total_nodes > 0 and not (cluster.nodes or {}).get(each.name) for each in mine]
    if cluster.nodes is None or not mine or not all(is_hidden):
        return cluster
    missing = {**cluster.missing, "nodes": "Slurm does not show the nodes of the partition"}
    return replace(cluster, nodes=None, gpu_types=None, missing=missing)


def _question(draft: Draft) -> object:
    plan = draft.plan
    return plan.scheduler, plan.slurm_conf, plan.job.queue.partition, plan.job.container is None


@gathers("cluster", same=_question)
def _cluster(draft: Draft) -> ClusterFacts | None:
    return cluster_facts(draft.plan)
