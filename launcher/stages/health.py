"""The gate before the tasks of a job, and its spare nodes: the keys `resilience.health` and `spares`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.errors import setting_error
from launcher.plan import SOURCES_WITHOUT_PATH, Container, Health, Resources
from launcher.stages.containers import select_outermost

# The stages whose jobs are worth it: long ones, on many nodes.
GATED_STAGES = ("training", "command")


def health_of(
    config: RunConfig, stage: str, container: Container | None, paths: Iterable[Path]
) -> Health | None:
    """Return the request to the nodes of a stage's job; ``None`` if they are not asked."""
    resilience = config.resilience
    if resilience.health == "off" or stage not in GATED_STAGES or config.cluster.scheduler == "local":
        return None
    needed = list(paths)
    if container is not None:
        needed += [Path(each.source) for each in container.mounts if each.source not in SOURCES_WITHOUT_PATH]
        needed += [Path(container.image)] if container.is_file else []
    outermost = select_outermost(list(dict.fromkeys(needed)))
    command = tuple(resilience.health_command) if resilience.health == "full" else ()
    return Health(tuple(map(str, outermost)), command)


def add_spares(config: RunConfig, stage: str, requested: Resources) -> Resources:
    """Return resources with the spare nodes; raise UserError where there can be none, or none is used."""
    spares, scheduler = config.resilience.spares, config.cluster.scheduler
    if not spares or stage not in GATED_STAGES:
        return requested
    setting = f"resilience.spares={spares}"
    if scheduler != "slurm":
        why = "takes further nodes of the allocation by itself" if scheduler == "allocation" else "has none"
        raise setting_error(
            f"{setting}: cluster.scheduler={scheduler} {why}",
            hint="resilience.spares=0",
            also=("cluster.scheduler",),
        )
    if config.resilience.nodes is not None and stage == "training":
        raise setting_error(
            f"{setting}: resilience.nodes is a range, of which the tasks take every node",
            hint="resilience.spares=0, or resilience.nodes=null",
            also=("resilience.nodes",),
        )
    if config.resilience.health == "off" and not config.resilience.restarts:
        hint = "resilience.health=quick, resilience.restarts=3, or resilience.spares=0"
        raise setting_error(f"{setting}: nothing finds a node that is to be replaced", hint=hint)
    segment, total = str(config.cluster.sbatch.get("segment")), requested.nodes + spares
    if segment.isdigit() and int(segment) and total % int(segment):
        raise setting_error(
            f"{setting}: cluster.sbatch.segment={segment} has to divide the {total} nodes of the job",
            hint=f"resilience.spares={spares + int(segment) - total % int(segment)}",
            also=("cluster.sbatch.segment",),
        )
    return replace(requested, spares=spares)
