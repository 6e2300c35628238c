"""The variables of a shell that change what a cluster's commands mean, silently."""

from __future__ import annotations

# Those with these beginnings override a script's own header (SBATCH_), leak out of an allocation (SLURM_) or
# change what the commands print (SQUEUE_, SACCT_, ...).
LEAKS = (
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
KEPT = ("SLURM_CONF",)
