"""The keys of `resilience`, for one stage: what follows when a job ends before its training."""

from __future__ import annotations

from launcher.config.schema import ClusterConfig, RunConfig
from launcher.config.stage_schema import RunConfigNode
from launcher.errors import UserError
from launcher.plan import Chain
from launcher.slurm.notations import parse_time_limit

# Long enough for the last checkpoint of most; of a short limit a part, so that there is something to save.
_LONGEST_MARGIN = 300
_MARGIN_PART = 4


def chain(config: RunConfig, checkpoints: str) -> Chain:
    """Return the chain of a training's jobs.

    Raises
    ------
    UserError
        Where there is no queue that a next link could wait in, or each task of an array would have its own.
    """
    resilience, cluster = config.resilience, config.cluster
    if resilience.links > 1:
        _require_queue(resilience.links, cluster)
    return Chain(
        links=resilience.links,
        from_job=resilience.submit == "job",
        max_failures=resilience.max_failures,
        exclude_hours=resilience.exclude_hours,
        checkpoints=checkpoints,
    )


def _require_queue(links: int, cluster: ClusterConfig) -> None:
    setting = f"resilience.links={links}"
    if cluster.scheduler != "slurm":
        raise UserError(
            f"{setting}: cluster.scheduler={cluster.scheduler} has no queue in which a next job could wait",
            key="resilience.links",
            also=("cluster.scheduler",),
            hint="resilience.links=1, and launch again to continue",
        )
    if cluster.sbatch.get("array") not in (None, False):
        raise UserError(
            f"{setting}: the tasks of an array, cluster.sbatch.array, cannot each be a chain",
            key="resilience.links",
            also=("cluster.sbatch.array",),
            hint="resilience.links=1, or cluster.sbatch.array=null",
        )


def check_range(config: RunConfig) -> None:
    """Hold a range of nodes against itself and the scheduler.

    Raises
    ------
    UserError
        If it is empty, or nobody chooses from it.
    """
    nodes, scheduler = config.resilience.nodes, config.cluster.scheduler
    if nodes is None:
        return
    if nodes.min > nodes.max:
        raise UserError(
            f"resilience.nodes.min={nodes.min}: more than resilience.nodes.max, {nodes.max}",
            key="resilience.nodes.min",
            also=("resilience.nodes.max",),
            hint=f"resilience.nodes.min={nodes.max}, or less",
        )
    if scheduler != "slurm":
        raise UserError(
            f"resilience.nodes: cluster.scheduler={scheduler} has no queue that chooses how many",
            key="resilience.nodes",
            also=("cluster.scheduler",),
            hint=f"resilience.nodes=null training.trainer.num_nodes={nodes.min}",
        )


def save_signal(config: RunConfig, run: RunConfigNode) -> str | None:
    """Return the value of ``sbatch --signal``, by which Slurm announces the time limit.

    The site's own `cluster.signal` wins.
    """
    margin = config.resilience.save_before_end
    if config.cluster.signal is not None or margin is None:
        return config.cluster.signal
    seconds = _margin(run.time_limit) if margin == "auto" else margin
    return None if seconds is None else f"B:USR1@{seconds}"


def _margin(time_limit: str | None) -> int | None:
    """Return the seconds before the limit for saving; ``None`` if no limit of ours ends the job."""
    try:
        limit = parse_time_limit(time_limit) if time_limit is not None else None
    except ValueError:
        return None  # the checks tell
    return None if limit is None else max(1, min(_LONGEST_MARGIN, limit // _MARGIN_PART))
