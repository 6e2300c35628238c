"""What the job script is told of its chain: the settings of ``templates/resilience.sh``."""

from __future__ import annotations

from typing import Any

from launcher.plan import Job, Plan


def chain_settings(plan: Plan) -> list[str]:
    """``NAME=VALUE``, empty where there is none or it does not apply."""
    job, paths = plan.job, plan.paths
    chain, queue = job.chain, job.queue
    settings: dict[str, Any] = {
        "links": chain.links,
        "submit": "job" if chain.from_job else "launch",
        "max_failures": chain.max_failures,
        "exclude_seconds": round(chain.exclude_hours * 3600),
        "exclude": queue.exclude,
        "header_excludes": "yes" if queue.exclude_all else None,
        "singleton": "yes" if "singleton" in (queue.dependency or "").split(",") else None,
        "begin": queue.begin,
        "scheduler": plan.scheduler,
        "engine": job.engine,
        # What is no training cannot save, nor diverge.
        "save_signal": job.payload.save_signal if job.stage == "training" else None,
        "tasks_per_node": job.resources.tasks_per_node,
        "checkpoints": chain.checkpoints,
        "failures": _failures(job),
        "run_dir": paths.run_dir,
        "script": paths.script,
        "log": paths.directory / paths.log_prefix,
    }
    return [f"{name}={'' if value is None else value}" for name, value in settings.items()]


def _failures(job: Job) -> str | None:
    """Where the ranks of our trainer say what they failed of."""
    if job.engine != "megatron" or job.config is None:
        return None
    directory = job.config.get("exp_manager", {}).get("explicit_log_dir")
    return None if directory is None else f"{directory}/failures"
