"""The schedulers that jobs are submitted to: Slurm, and processes of this machine."""

from __future__ import annotations

from launcher.schedulers.base import Scheduler


def scheduler_for(name: str, slurm_conf: str | None, host: str = "") -> Scheduler:
    """Return the scheduler that `cluster.scheduler` names; without Slurm that of a host."""
    # Imported late: most commands need one of the two, and a list of runs neither.
    if name != "slurm":
        from launcher.schedulers.local import LocalScheduler

        return LocalScheduler(in_allocation=name == "allocation", host=host)
    from launcher.schedulers.slurm import SlurmScheduler

    return SlurmScheduler(slurm_conf)
