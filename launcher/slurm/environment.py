"""The variables of a shell that silently change what Slurm's commands do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

# These override a script's own header (SBATCH_), leak out of an allocation (SLURM_) or change what the
# commands print (SQUEUE_, SACCT_, ...).
INHERITED_PREFIXES = (
    "SBATCH_",
    "SLURM_",
    "SRUN_",
    "SALLOC_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCONTROL_",
    "SCANCEL_",
    "PMI_",
    "PMIX_",
    "PYXIS_CONTAINER_",  # Pyxis takes its options from there as well
)

# The configuration of the site, where the user's shell names it.
KEPT_VARIABLES = ("SLURM_CONF",)

# Variables that a user sets in the shell, and the override that does the same.
_INSTEAD = {
    "SBATCH_PARTITION": "cluster.partition={}",
    "SBATCH_ACCOUNT": "cluster.account={}",
    "SBATCH_TIMELIMIT": "training.run.time_limit={}",
    "SBATCH_GRES": "cluster.gres={}",
    "SBATCH_GPUS_PER_NODE": "cluster.gpus_per_node={}",
    "SBATCH_GPUS_PER_TASK": "cluster.gpus_per_task={}",
    "SBATCH_MEM_PER_NODE": "cluster.mem={}",
    "SBATCH_JOB_NAME": "training.run.name={}",
    "SBATCH_QOS": "cluster.qos={}",
    "SBATCH_RESERVATION": "cluster.reservation={}",
    "SBATCH_CONSTRAINT": "cluster.constraint={}",
    "SBATCH_REQ_SWITCH": "cluster.switches={}",
    "SBATCH_SIGNAL": "cluster.signal={}",
    # sbatch asks only whether these are set.
    "SBATCH_REQUEUE": "cluster.requeue=True",
    "SBATCH_NO_REQUEUE": "cluster.requeue=False",
}


def inherited_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of an environment that would silently change a submission."""
    return sorted(
        name for name in environment if name.startswith(INHERITED_PREFIXES) and name not in KEPT_VARIABLES
    )


def describe_ignored(environment: Mapping[str, str]) -> list[str]:
    """Return a message for each variable that would have changed a submission, and does not."""
    inherited = inherited_variables(environment)
    messages = []
    for name in inherited:
        if name.startswith("SBATCH_"):
            message = f"{name}={environment[name]} of your shell is not passed on to sbatch"
            if override := _INSTEAD.get(name):
                message += f"; instead: {shlex.quote(override.format(environment[name]))}"
            messages.append(message)
    allocation = [name for name in inherited if name.startswith("SLURM_")]
    if allocation:
        job = environment.get("SLURM_JOB_ID")
        of_job = f"of job {job}, in which you are, " if job else ""
        names = ", ".join(allocation[:3]) + (", ..." if len(allocation) > 3 else "")
        messages.append(f"SLURM_* variables {of_job}are not passed on to sbatch: {names}")
    return messages


def clean_environment(slurm_conf: str | None) -> dict[str, str]:
    """Return the user's environment without the variables that would silently change a submission."""
    inherited = set(inherited_variables(os.environ))
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    if slurm_conf is not None:
        environment["SLURM_CONF"] = slurm_conf
    return environment
