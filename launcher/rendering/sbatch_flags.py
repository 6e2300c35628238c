"""The table of sbatch's flags: which part of a job each one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.plan import Job, Plan, Resources
from launcher.rendering.quoting import RawShell, escape_pattern, quote_header

# A flag and the value it takes from the job; None or False leaves the flag out, True makes it bare.
FLAGS: tuple[tuple[str, Callable[[Job], Any]], ...] = (
    ("partition", lambda job: job.queue.partition),
    ("account", lambda job: job.queue.account),
    ("qos", lambda job: job.queue.qos),
    ("reservation", lambda job: job.queue.reservation),
    ("constraint", lambda job: job.queue.constraint),
    ("nodelist", lambda job: job.queue.nodelist),
    ("exclude", lambda job: job.queue.exclude),
    ("switches", lambda job: job.queue.switches),
    ("licenses", lambda job: job.queue.licenses),
    ("nodes", lambda job: _nodes(job.resources)),
    ("ntasks-per-node", lambda job: _tasks_per_node(job.resources)),
    ("gpus-per-node", lambda job: job.resources.gpus_per_node),
    ("gpus-per-task", lambda job: job.resources.gpus_per_task),
    ("gres", lambda job: job.resources.gres),
    ("cpus-per-task", lambda job: _cpus_per_task(job.resources)),
    ("mem", lambda job: job.resources.memory),
    ("exclusive", lambda job: job.resources.exclusive),
    ("time", lambda job: job.resources.time_limit),
    ("begin", lambda job: job.queue.begin),
    ("deadline", lambda job: job.queue.deadline),
    ("dependency", lambda job: job.queue.dependency),
    ("requeue", lambda job: job.queue.requeue is True),
    ("no-requeue", lambda job: job.queue.requeue is False),
    ("signal", lambda job: job.queue.signal),
    ("mail-type", lambda job: job.queue.mail_type),
    ("mail-user", lambda job: job.queue.mail_user),
    ("comment", lambda job: job.queue.comment),
)


def header_lines(plan: Plan) -> list[RawShell]:
    """Return the script's ``#SBATCH`` lines, quoted as sbatch reads them."""
    values: list[tuple[str, Any]] = [("job-name", plan.paths.job_name)]
    values += [(flag, value(plan.job)) for flag, value in FLAGS]
    values += plan.job.queue.further.items()
    # Slurm opens the log before the script runs, so it cannot be a variable of the script.
    job = "%A_%a" if "array" in plan.job.queue.further else "%j"
    log = escape_pattern(str(plan.paths.directory / plan.paths.log_prefix)) + job
    values.append(("output", f"{log}.out"))
    values.append(("error", None if plan.job.merge_stderr else f"{log}.err"))
    values.append(("open-mode", "append"))  # a requeued job keeps what its first life said
    return [_line(flag, value) for flag, value in values if value is not None and value is not False]


def empty_script(plan: Plan) -> str:
    """Return a script that requests the same as a plan's job, and does nothing: for `sbatch --test-only`."""
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in header_lines(plan)), ""])


def salloc_arguments(plan: Plan) -> list[str]:
    """Return the flags of salloc for an interactive session: those of sbatch without logs."""
    values: list[tuple[str, Any]] = [("job-name", plan.paths.job_name)]
    values += [(flag, value(plan.job)) for flag, value in FLAGS]
    values += plan.job.queue.further.items()
    return [
        f"--{flag}" if value is True else f"--{flag}={value}"
        for flag, value in values
        if value is not None and value is not False
    ]


def _nodes(resources: Resources) -> str:
    least, most = resources.nodes, resources.max_nodes
    return str(least) if most is None else f"{least}-{most}"


def _tasks_per_node(resources: Resources) -> int | None:
    # Told of tasks, sbatch gives a range no more nodes than the least number has tasks; srun is told of them.
    return resources.tasks_per_node if resources.max_nodes is None else None


def _cpus_per_task(resources: Resources) -> int | None:
    """To sbatch, a range has one task on each node, with the cores of all."""
    if resources.max_nodes is None:
        return resources.cpus_per_task
    return resources.tasks_per_node * (resources.cpus_per_task or 1)


def _line(flag: str, value: Any) -> RawShell:
    return RawShell(f"--{flag}" if value is True else f"--{flag}={quote_header(value)}")
