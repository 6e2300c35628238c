"""Submit Slipway's own script with submitit.

The hooks are private to submitit: tests/schedulers/test_submission.py is the contract with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from launcher.errors import UserError
from launcher.runs.paths import JOB_ID_LOG, submitted_name
from launcher.runs.write import link_or_copy
from launcher.schedulers.base import NoAnswer, Submission
from launcher.slurm.commands import Unreachable, error_text, notice_of, says_unanswered
from launcher.slurm.environment import inherited_variables
from slipway.common.files import read_text, write_atomic

_logger = logging.getLogger(__name__)

# The program that runs sbatch without some of the user's variables.
_ENV = "env"

# sbatch's message about an accepted job; a site's wrapper may print more around it.
_ACCEPTED = re.compile(r"^Submitted batch job ([0-9]+)\b", re.MULTILINE)


class SbatchExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is untyped here
    """A submitit executor that submits a script, copied into `folder`, instead of a pickled function."""

    def __init__(self, folder: str, script: Path, command: list[str]) -> None:
        super().__init__(folder=folder)
        self._script = script
        self._command = command

    def submit_script(self) -> str:
        """Submit the script; return the job's id."""
        return str(self._submit_command("").job_id)

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        job_id = _read_accepted(text, self._script.parent.parent)
        if job_id is None:
            raise FailedSubmissionError("no id of a job")
        return job_id

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self._command


def _read_accepted(answer: str, launch_dir: Path) -> str | None:
    """Return the id of the job that sbatch accepted; log the site's message, and keep it."""
    accepted = _ACCEPTED.search(answer)
    if accepted is None:
        return None
    notice, log = notice_of(answer), launch_dir / JOB_ID_LOG
    with contextlib.suppress(OSError):
        known = read_text(log).splitlines() if log.exists() else []
        if notice and notice not in known:
            _logger.warning("sbatch says of job %s: %s", accepted[1], notice)
            write_atomic(log, "".join(f"{line}\n" for line in (*known, notice)))
    return accepted[1]


def submit_script(submission: Submission, slurm_conf: str | None) -> str:
    """Submit a written script; return the job's id.

    Raise NoAnswer if Slurm may have the job all the same: its controller is busy, or its answer was lost;
    UserError with Slurm's own words if it refuses.
    """
    tag, link = submission.tag, submission.link
    script = submitted_name(submission.script, tag, link)
    try:
        link_or_copy(script, submission.script)
    except OSError as error:
        raise UserError(f"cannot write {script}: {error.strerror}") from error
    # `env` and not os.environ: submitting must not change the launcher's own environment.
    command = [_ENV, *(word for name in inherited_variables(os.environ) for word in ("-u", name))]
    command += [] if slurm_conf is None else [f"SLURM_CONF={slurm_conf}"]
    # A site's filter prints to stderr, which submitit returns only if sbatch fails.
    command += ["sh", "-c", 'exec "$@" 2>&1', "sh", "sbatch"]
    # Without it a job with an unsatisfiable dependency would wait for ever.
    after, exclude = submission.after, submission.exclude
    command += [] if after is None else [f"--dependency={after}", "--kill-on-invalid-dep=yes"]
    command += [] if exclude is None else [f"--exclude={exclude}"]
    command += [str(script), *([tag] if link == 1 else [str(link), tag])]
    try:
        # Not in the script's directory: submitit would interpret a % in its name.
        with tempfile.TemporaryDirectory(prefix="slipway-") as folder:
            return SbatchExecutor(folder, script, command).submit_script()
    except (FailedJobError, FailedSubmissionError) as error:
        return _recover_id(error, submission.script.parent)
    except OSError as error:
        if error.filename == _ENV:
            message = (error.strerror or str(error)).lower()
            raise Unreachable(f"sbatch cannot be run: {_ENV}: {message}") from error
        # submitit's own copy, before or after sbatch had the job
        raise NoAnswer(f"cannot write into {tempfile.gettempdir()} (TMPDIR): {error.strerror}") from error


def _recover_id(error: Exception, launch_dir: Path) -> str:
    """Return the id that sbatch printed before a later failure; else raise the error of the failure."""
    failed = error.__cause__
    if not isinstance(failed, subprocess.CalledProcessError):
        raise NoAnswer("Slurm did not answer: sbatch ended without telling the id of a job") from error
    answer = failed.stdout or ""
    if accepted := _read_accepted(answer, launch_dir):
        return accepted
    # A shell exits with 128 plus the signal; sbatch itself with 1, or with 255 for its options.
    if failed.returncode < 0 or 128 < failed.returncode < 255:
        raise NoAnswer("Slurm did not answer: sbatch was killed") from error
    lines = [line for line in answer.splitlines() if line.startswith("sbatch: ")]
    text = error_text("\n".join(lines) or answer)
    message = text.removeprefix("Batch job submission failed: ")
    # Without a complaint of sbatch itself, something around it failed.
    complains = any(not line.startswith("sbatch: warning: ") for line in lines)
    if not complains or says_unanswered(text):
        raise NoAnswer(f"Slurm did not answer: {message}") from error
    raise UserError(f"Slurm refused the job: {message}") from error
