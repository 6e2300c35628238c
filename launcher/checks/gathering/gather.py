"""Facts: what checks need to know of files and of the cluster, found out by reading alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.checks.facts import Facts
from launcher.checks.gathering.earlier import earlier_training
from launcher.checks.gathering.images import image_facts
from launcher.checks.gathering.job_names import same_job_name
from launcher.checks.gathering.keys import added_keys
from launcher.checks.gathering.path_resolver import Ground
from launcher.checks.gathering.paths import path_facts
from launcher.checks.gathering.secrets import lost_secrets, open_secrets
from launcher.checks.gathering.trainer import trainer_verdict
from launcher.checks.rules.gpus import gpus_of
from launcher.drafting import Draft
from launcher.plan import Plan
from launcher.sandbox import is_sandbox
from launcher.slurm.cluster import ClusterFacts
from launcher.stages.stage_cluster import stage_cluster

VerdictOf = Callable[[Plan], str | None]
ClusterOf = Callable[[Plan], ClusterFacts | None]


def gather(
    made: Draft,
    *,
    look: bool = True,
    verdict_of: VerdictOf | None = None,
    cluster_of: ClusterOf | None = None,
) -> Facts:
    """Find out, by reading alone, what the checks need to know.

    Parameters
    ----------
    verdict_of
        Tells what the trainer says, where it was asked already.
    cluster_of
        Tells what the cluster says, likewise.
    """
    added, shipped = added_keys(made)
    return Facts(
        added_keys=added,
        shipped_keys=shipped,
        same_job_name=same_job_name(made.plan, Path(made.composition.config.base_results_dir))
        if look
        else None,
        open_secrets=open_secrets(made.plan) if look else None,
        lost_secrets=lost_secrets(made) if look else None,
        paths=path_facts(made) if look else None,
        image=image_facts(Ground(made), look=look),
        earlier=earlier_training(made) if look else None,
        cluster=(cluster_of or _cluster)(made.plan) if look else None,
        node_gpus=_node_gpus(made),
        lacks_gpus=_lacks_gpus(made.plan) if look else None,
        trainer_verdict=(verdict_of or trainer_verdict)(made.plan),
    )


def _cluster(plan: Plan) -> ClusterFacts | None:
    # Imported late: a dry run does not look, and need not know how to run a cluster's commands.
    from launcher.checks.gathering.cluster import cluster_facts

    return cluster_facts(plan)


def _lacks_gpus(plan: Plan) -> str | None:
    """The reason why our trainer finds no GPU, where this machine can tell."""
    if plan.job.engine != "megatron":
        return None
    if plan.scheduler == "local":
        return None if any(Path("/dev").glob("nvidia*")) else "this machine has no GPU (no /dev/nvidia*)"
    is_in_sandbox = plan.slurm_conf is not None and is_sandbox(Path(plan.slurm_conf).parent.parent)
    return "the GPUs of the sandbox are fake" if is_in_sandbox else None


def _node_gpus(made: Draft) -> int | None:
    """The GPUs of a node, of whichever key the cluster names them with."""
    config, stage = made.composition.config, made.plan.job.stage
    changes = config.stage_cluster.get(stage, {})  # type: ignore[call-overload]  # a name of a stage
    cluster = stage_cluster(config.cluster, stage, changes)
    return gpus_of(cluster.gpus_per_node, cluster.gres)
