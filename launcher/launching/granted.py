"""What Slurm granted to a job, where that is not what was asked for: a site's filters may change it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from launcher.checks.facts import Facts
from launcher.plan import Plan
from launcher.runs.paths import JOB_ID_LOG
from launcher.slurm.notations import parse_time_limit
from launcher.slurm.questions import ask_at_once
from launcher.slurm.records import SEPARATOR

_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in ("Partition", "Account", "NumNodes", "TimeLimit"))


def granted(plan: Plan, facts: Facts, job_id: str) -> dict[str, dict[str, str]]:
    """Return what the queue has of a new job and the launch did not ask for, with both, by its name.

    Slurm is asked only where filters may have changed the job: where it has them, or sbatch had a notice.
    """
    settings = facts.cluster.settings if facts.cluster is not None else None
    may_differ = (settings is not None and settings.has_filters) or _has_notice(plan.paths.directory)
    if plan.scheduler != "slurm" or not may_differ:
        return {}
    question = ["squeue", "--all", "--noheader", "--states=all", f"--Format={_FORMAT}", f"--jobs={job_id}"]
    (reply,) = ask_at_once({"job": question}, plan.slurm_conf).values()
    queue, resources = plan.job.queue, plan.job.resources
    nodes = None if resources.is_elastic else str(resources.nodes)
    asked = {"partition": queue.partition, "account": queue.account, "nodes": nodes}
    asked["time limit"] = resources.time_limit
    got = zip(asked, reply.text.split(SEPARATOR), strict=False)
    return {
        name: {"asked": value, "granted": text}
        for name, text in got
        if text and (value := asked[name]) is not None and not _is_same(value, text)
    }


def _has_notice(launch_dir: Path) -> bool:
    return (launch_dir / JOB_ID_LOG).exists()


def _is_same(asked: str, text: str) -> bool:
    with contextlib.suppress(ValueError):  # a time limit, or a number of nodes
        return parse_time_limit(asked) == parse_time_limit(text)
    return set(text.lower().split(",")) <= set(asked.lower().split(","))
