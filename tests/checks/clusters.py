"""The answers of a cluster of four nodes of eight GPUs, as literals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.checks.findings import Finding
from launcher.checks.registry import run_checks
from launcher.plan import Chain, Plan
from launcher.slurm.cluster import (
    Association,
    ClusterFacts,
    Limits,
    Node,
    Partition,
    Qos,
    Settings,
)
from tests.checks.plans import GPT, KNOWN, changed, plan_of

NODES = "training.trainer.num_nodes"
LIMIT = "training.run.time_limit"


def node(name: str, **changes: Any) -> Node:
    features = frozenset({"ib", "a100"})
    base = Node(name, "idle", True, cpus=64, memory=512_000, gpus=(("a100", 8),), features=features)
    return base._replace(**changes)


GPU = tuple(node(f"n{number}") for number in range(1, 5))
DOWN = {"state": "down*", "is_usable": False}

ENFORCED = Settings(1001, 10_000, True, frozenset({"associations", "limits", "qos"}))

CLUSTER = ClusterFacts(
    gpu_types=("a100",),
    partitions=(
        Partition("gpu", is_default=True, total_nodes=4, max_seconds=86400),
        Partition("short", total_nodes=4, max_seconds=600, max_nodes=1),
        Partition("big", total_nodes=64),
    ),
    nodes={"gpu": GPU},
    settings=ENFORCED,
    associations=(
        Association("research", qos=("debug", "normal"), default_qos="normal", is_default=True),
        Association("vision", partition="big", qos=("normal",)),
    ),
    qos=(
        Qos("normal"),
        Qos("debug", Limits(max_seconds=1800, per_job={"node": 1}, max_submitted=4)),
        Qos("idle"),
        Qos("long", flags=frozenset({"denyonlimit", "partitiontimelimit"})),
    ),
    pyxis=True,
)


def plan_with(
    queue: dict[str, Any] | None = None, *, nodes: int = 2, chain: Chain | None = None, **resources: Any
) -> Plan:
    """Return the plan of a GPT with these requests."""
    plan = plan_of(changed(GPT, {"trainer.num_nodes": nodes}), resources=resources)
    job = replace(plan.job, queue=replace(plan.job.queue, **(queue or {})), chain=chain or Chain())
    return replace(plan, job=job)


def cluster_findings(plan: Plan, cluster: ClusterFacts | None, **facts: Any) -> list[Finding]:
    findings = run_checks(plan, replace(KNOWN, cluster=cluster, **facts))
    return [finding for finding in findings if finding.id.startswith("cluster.")]


def only_finding(plan: Plan, cluster: ClusterFacts, **facts: Any) -> Finding:
    (finding,) = cluster_findings(plan, cluster, **facts)
    return finding


def with_nodes(*nodes: Node) -> ClusterFacts:
    first, *others = CLUSTER.partitions or ()
    partitions = (first._replace(total_nodes=len(nodes)), *others)
    return replace(CLUSTER, nodes={"gpu": nodes}, partitions=partitions)


def with_partitions(*partitions: Partition) -> ClusterFacts:
    return replace(CLUSTER, partitions=partitions)
