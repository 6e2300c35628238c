"""submitit, told to submit our own script.

The hooks used here are private to submitit: tests/test_submission.py is the contract with them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from launcher.errors import UserError
from launcher.schedulers.base import NoAnswer
from launcher.schedulers.commands import words

# sbatch's words for a controller that said nothing; it may have taken the job.
_LOST = re.compile("timed out|connect|communicat|Zero Bytes|standby|Transport|reset by peer", re.IGNORECASE)


class SbatchExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is untyped here
    """Submits a script that is already written, in place of one that runs a pickled function.

    `folder` is for submitit's own copy of the script.
    """

    def __init__(
        self, folder: str, script: Path, tag: str, unset: Sequence[str], slurm_conf: str | None
    ) -> None:
        super().__init__(folder=folder)
        self._script = script
        self._tag = tag
        self._unset = unset
        self._slurm_conf = slurm_conf

    def submit_script(self) -> str:
        """Submit, and return the job's id."""
        return str(self._submit_command("").job_id)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # `env` and not os.environ: submitting must not change the launcher's own environment.
        environment = [argument for name in self._unset for argument in ("-u", name)]
        if self._slurm_conf is not None:
            environment.append(f"SLURM_CONF={self._slurm_conf}")
        return ["env", *environment, "sbatch", str(self._script), self._tag]


def submit_script(script: Path, tag: str, unset: Sequence[str], slurm_conf: str | None) -> str:
    """Submit a written script with submitit; return the job's id.

    Parameters
    ----------
    tag
        The script's argument.
    unset
        Names of variables that sbatch must not see.

    Raises
    ------
    NoAnswer
        If Slurm may have the job all the same: its controller is busy, or was lost on the way.
    UserError
        With Slurm's own words, if it refuses.
    """
    try:
        # Not beside the script: submitit would read a % in the name of a run's directory.
        with tempfile.TemporaryDirectory(prefix="slipway-") as folder:
            return SbatchExecutor(folder, script, tag, unset, slurm_conf).submit_script()
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [line for line in str(error).splitlines() if line.startswith("sbatch: ")]
        told = words("\n".join(lines) or str(error))
        if lines and not _LOST.search(told):
            raise UserError(f"Slurm refused the job: {told}") from error
        raise NoAnswer(f"Slurm did not answer: {told}") from error
    except OSError as error:  # submitit's own copy, before or after sbatch had the job
        raise NoAnswer(f"cannot write into {tempfile.gettempdir()} (TMPDIR): {error.strerror}") from error
