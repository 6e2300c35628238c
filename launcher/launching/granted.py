"""The requests of a job that Slurm granted otherwise, as a site's filters may do."""

from __future__ import annotations

import contextlib

from launcher.checks.facts import Facts
from launcher.plan import Plan
from launcher.runs.paths import JOB_ID_LOG
from launcher.slurm.notations import parse_time_limit
from launcher.slurm.questions import ask_at_once
from launcher.slurm.records import SEPARATOR

_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in ("Partition", "Account", "NumNodes", "TimeLimit"))


def granted(plan: Plan, facts: Facts, job_id: str) -> dict[str, dict[str, str]]:
    """Return the requested and the granted resources of a new job where they differ, by their names.

    Slurm is asked only where filters may have changed the job: where it has them, or sbatch had a notice.
    """
    settings = facts.cluster.settings if facts.cluster is not None else None
    has_filters = settings is not None and settings.has_filters
    if plan.scheduler != "slurm" or not (has_filters or (plan.paths.directory / JOB_ID_LOG).exists()):
        return {}
    question = ["squeue", "--all", "--local", "--noheader", "--states=all"]
    question += [f"--Format={_FORMAT}", f"--jobs={job_id}"]
    values = ask_at_once({"job": question}, plan.slurm_conf)["job"].text.split(SEPARATOR)
    queue, resources = plan.job.queue, plan.job.resources
    nodes = None if resources.is_elastic else str(resources.nodes + resources.spares)
    asked = (queue.partition, queue.account, nodes, resources.time_limit)
    return {
        name: {"asked": wish, "granted": value}
        for name, wish, value in zip(
            ("partition", "account", "nodes", "time limit"), asked, values, strict=False
        )
        if wish is not None and value and not _is_same(wish, value)
    }


def _is_same(wish: str, value: str) -> bool:
    with contextlib.suppress(ValueError):  # a time limit, or a number of nodes
        return parse_time_limit(wish) == parse_time_limit(value)
    return set(value.lower().split(",")) <= set(wish.lower().split(","))
