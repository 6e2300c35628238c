"""What a job waits for, as ``sbatch --dependency`` takes it: on the command line it replaces the header's."""

from __future__ import annotations

from launcher.errors import UserError, shown


def beside(own: str | None, after: str, key: str = "training.run.dependency") -> str:
    """What a job waits for that waits for another one besides what its header says.

    Raises
    ------
    UserError
        If its own are alternatives (``?``): Slurm takes all of them or any, and no mixture.
    """
    if own is None:
        return after
    condition = after.partition(":")[0]
    if "?" in own:
        raise UserError(
            f"{key}={shown(own)}: alternatives (?) cannot be waited for together with {condition}",
            key=key,
            hint=f"{key}=null, or all of several, with commas between",
        )
    return f"{after},{own}"
