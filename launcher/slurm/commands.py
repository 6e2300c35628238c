"""Running a cluster's commands in an environment that cannot change what they mean."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import UserError
from launcher.leaks import KEPT, LEAKS

# In front of what Slurm's commands complain of: their own name, or that of a function of theirs.
_PROGRAM = re.compile(r"^(\w+: (error: )?|slurm_\w+ error: )")

_TIMEOUT_SECONDS = 60.0
# After so long somebody who waits is told what for.
_TELL_AFTER_SECONDS = 3.0

logger = logging.getLogger("launcher.schedulers")

# What to do where there is none.
WITHOUT_SLURM = (
    "a throw-away Slurm: `slipway sandbox up` and cluster=sandbox; without Slurm: cluster=local;"
    " only to see the script: --dry-run"
)


class Unreachable(UserError):
    """There is no scheduler here that could be asked."""


class Silent(Unreachable):
    """The scheduler does not answer, however often it is asked."""

    exit_code = 3  # NOT_KNOWN of tracking.exit_codes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int
    stdout: str
    stderr: str


def leaked_variables(environment: Mapping[str, str]) -> list[str]:
    """The variables of an environment that would silently change a submission."""
    return sorted(name for name in environment if name.startswith(LEAKS) and name not in KEPT)


# What a user sets in the shell, and the key that says the same.
_KEYS = {
    "SBATCH_PARTITION": "cluster.partition",
    "SBATCH_ACCOUNT": "cluster.account",
    "SBATCH_TIMELIMIT": "training.run.time_limit",
    "SBATCH_GRES": "cluster.gres",
    "SBATCH_GPUS_PER_NODE": "cluster.gpus_per_node",
    "SBATCH_GPUS_PER_TASK": "cluster.gpus_per_task",
    "SBATCH_MEM_PER_NODE": "cluster.mem",
    "SBATCH_JOB_NAME": "training.run.name",
}


def describe_leaks(environment: Mapping[str, str]) -> list[str]:
    """Say of the variables that would have changed a submission that they do not."""
    leaked = leaked_variables(environment)
    told = []
    for name in leaked:
        if name.startswith("SBATCH_"):
            key = _KEYS.get(name)
            instead = f"; instead: {key}={environment[name]}" if key else ""
            told.append(f"{name}={environment[name]} of your shell is not passed on to sbatch{instead}")
    allocation = [name for name in leaked if name.startswith("SLURM_")]
    if allocation:
        job = environment.get("SLURM_JOB_ID")
        of = f"of job {job}, in which you are, " if job else ""
        names = ", ".join(allocation[:3]) + (", ..." if len(allocation) > 3 else "")
        told.append(f"SLURM_* variables {of}are not passed on to sbatch: {names}")
    return told


def clean_environment(slurm_conf: str | None) -> dict[str, str]:
    """The user's environment without what would silently change a submission."""
    leaked = set(leaked_variables(os.environ))
    environment = {name: value for name, value in os.environ.items() if name not in leaked}
    if slurm_conf is not None:
        environment["SLURM_CONF"] = slurm_conf
    return environment


def ask(command: Sequence[str], environment: Mapping[str, str], stdin: str = "") -> Answer:
    """Run a command of the cluster's and wait for what it says.

    Raises
    ------
    UserError
        If the command does not exist or does not answer.
    """
    try:
        return run(command, environment, _TIMEOUT_SECONDS, stdin)
    except TimeoutError as error:
        raise Unreachable(f"{command[0]} did not answer within {_TIMEOUT_SECONDS:.0f} s") from error


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    stdin: str = "",
    *,
    tell: bool = True,
) -> Answer:
    """Run a command of the cluster's, and tell the user when it takes long.

    Parameters
    ----------
    timeout
        In seconds; the command is ended after that.
    tell
        Say so when it takes long.

    Raises
    ------
    Unreachable
        If there is no such command.
    TimeoutError
        If it does not answer.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",  # other people's jobs may be called anything
        )
    except FileNotFoundError as error:
        raise Unreachable(
            f"{command[0]} is not on this machine: there is no Slurm here",
            hint=WITHOUT_SLURM,
        ) from error
    except OSError as error:
        raise Unreachable(f"{command[0]} cannot be run: {(error.strerror or str(error)).lower()}") from error
    with process:
        try:
            soon = min(_TELL_AFTER_SECONDS, timeout) if tell else timeout
            stdout, stderr = _wait(process, command[0], timeout, soon, stdin)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TimeoutError(command[0]) from error
        except BaseException:
            process.kill()
            raise
    return Answer(process.returncode, stdout, stderr)


def _wait(
    process: subprocess.Popen[str], name: str, timeout: float, soon: float, stdin: str
) -> tuple[str, str]:
    try:
        return process.communicate(stdin or None, timeout=soon)
    except subprocess.TimeoutExpired:
        if soon == timeout:
            raise
    logger.warning("%s has not answered for %.0f s; waiting", name, soon)
    return process.communicate(timeout=timeout - soon)


def words(stderr: str) -> str:
    """Slurm's message without its program's name in front of every line."""
    lines = [_PROGRAM.sub("", line).strip() for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line) or "no reason given"
