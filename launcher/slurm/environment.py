"""Remove variables of a shell that silently change the behavior of Slurm's commands."""

from __future__ import annotations

import os
from collections.abc import Mapping

# These override a script's header (SBATCH_), leak out of an allocation (SLURM_) or change the commands'
# output (SQUEUE_, SACCT_, ...).
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


def inherited_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of an environment that would silently change a submission."""
    return sorted(
        name for name in environment if name.startswith(INHERITED_PREFIXES) and name not in KEPT_VARIABLES
    )


def clean_environment(slurm_conf: str | None) -> dict[str, str]:
    """Return the user's environment without the variables that would silently change a submission."""
    inherited = set(inherited_variables(os.environ))
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    if slurm_conf is not None:
        environment["SLURM_CONF"] = slurm_conf
    return environment
