"""Slurm's commands as the script of a job calls them, played by bash."""

from __future__ import annotations

# srun runs the command behind its options as its only task. HOSTS are the hosts, STATE is the job's state.
JOB_COMMANDS = {
    "srun": """while [[ $1 != bash && $1 != apptainer ]]; do shift || exit 1; done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1
"$@\"""",
    "scontrol": "printf '%s\\n' ${HOSTS-n1}",
    "squeue": "echo ${STATE-RUNNING}",
}
