"""Run Slurm's commands: with a time limit, again if Slurm is busy, with an error for each kind of failure.

Slurm's own commands are patient too: they try for 9 s if no daemon listens, and for MessageTimeout (10 s by
default) if it does not answer; squeue of a single job does so twice. A dead controller therefore
gets one more try at most. Where a site limits the calls of a user (rl_enable), they sleep until the next is
due, for one or two minutes under the tightest limit known: no time limit here is shorter.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import random
from typing import NamedTuple

from launcher.errors import NOT_KNOWN, UserError, escape, shortened
from slipway.common.backoff import double_wait

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 150.0
# After this time a warning explains the wait.
_NOTICE_SECONDS = 3.0

# The hint on a machine without Slurm.
WITHOUT_SLURM = (
    "a throw-away Slurm: `slipway sandbox up` and cluster=sandbox; without Slurm: cluster=local;"
    " only to see the script: --dry-run"
)
NO_SLURM = "no Slurm found on this machine"

# The prefixes of Slurm's messages: the name of the command, or of one of its functions.
_PROGRAM = re.compile(r"^(\w+: (error: )?|slurm_\w+ error: )")

# The words of sbatch itself about a job that it accepts, or would.
_ACCEPTING = re.compile(r"Submitted batch job [0-9]+|Job [0-9]+ to start at ")

# Slurm's words, in lower case, for a controller that is busy, restarting or gone: asking again may help, and
# they do not say whether a submission was accepted.
_NO_ANSWER = (
    "backup controller in standby",
    "connect failure",
    "connection refused",
    "connection reset",
    "connection timed out",
    "in standby mode",
    "no route to host",
    "not responding",
    "persist_init",  # slurmdbd
    "problem talking to the database",
    "rate limit",
    "resource temporarily unavailable",
    "shutting down",
    "communication",
    "temporarily unable",
    "timed out",
    "transport endpoint",
    "unable to connect",
    "unable to contact",
    "unexpected message received",  # all that scontrol says about it
    "zero bytes",
)
_VERDICT = re.compile(r".*(Batch job submission failed|allocation failure): ", re.DOTALL)
# The commands are installed, but there is no slurm.conf.
_NO_CONFIGURATION = ("resolve_ctls_from_dns_srv", "fetch_config: DNS SRV lookup failed")


class Unreachable(UserError):
    """No scheduler can be asked from this machine."""


class SchedulerSilent(Unreachable):
    """The scheduler does not answer repeated questions."""

    exit_code = NOT_KNOWN


class Answer(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str


def error_text(stderr: str) -> str:
    """Return Slurm's message without the program's name before each line."""
    lines = [_PROGRAM.sub("", line).strip() for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line) or "no reason given"


def says_unanswered(message: str) -> bool:
    """Return True if Slurm's message means that no daemon answered; all other messages are answers.

    The site's filters may print any words before sbatch's own verdict.
    """
    lower = _VERDICT.sub("", message).lower()
    return any(words in lower for words in _NO_ANSWER)


def notice_of(answer: str) -> str | None:
    """Return the message of a site's filters on a job that sbatch accepts."""
    lines = [_PROGRAM.sub("", line).strip() for line in answer.splitlines()]
    said = "; ".join(line for line in dict.fromkeys(lines) if line and not _ACCEPTING.match(line))
    return escape(shortened(said)) if said else None


def says_no_slurm(message: str) -> bool:
    """Return True if Slurm's message means that this machine is part of no cluster."""
    return any(words in message for words in _NO_CONFIGURATION)


def ask(command: Sequence[str], environment: Mapping[str, str]) -> Answer:
    """Run one of Slurm's commands once; raise Unreachable if it is missing, or silent."""
    try:
        return run(command, environment, ANSWER_SECONDS)
    except TimeoutError as error:
        raise Unreachable(f"{command[0]} did not answer within {ANSWER_SECONDS:.0f} s") from error


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    *,
    notify: bool = True,
) -> Answer:
    """Run one of Slurm's commands, and kill it after `timeout` seconds.

    Raise Unreachable if there is no such command, TimeoutError if it does not answer.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",  # other people's jobs may have any name
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
            try:
                soon = min(_NOTICE_SECONDS, timeout) if notify else timeout
                stdout, stderr = process.communicate(timeout=soon)
            except subprocess.TimeoutExpired:
                if soon == timeout:
                    raise
                logger.warning("%s has not answered for %.0f s; waiting", command[0], soon)
                stdout, stderr = process.communicate(timeout=timeout - soon)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise TimeoutError(command[0]) from error
        except BaseException:
            process.kill()
            raise
    return Answer(process.returncode, stdout, stderr)


Run = Callable[[Sequence[str], Mapping[str, str], float], Answer]


@dataclass(slots=True)
class Retry:
    """The limits of asking a Slurm that does not answer again; all times in seconds.

    The pause after the first try doubles from then on, with a random part, so that waiting users do not
    all return at once. No try begins later than `last_start` after the first. A scheduler that did not answer
    is left alone for a `rest`: sooner questions fail at once.
    """

    first_pause: float = 0.5
    last_start: float = 10.0
    answer_timeout: float = ANSWER_SECONDS
    rest: float = 10.0
    run: Run = run
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random
    _silent: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def ask(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        who: str = "Slurm",
        timeout: float | None = None,
        again: bool = True,
    ) -> Answer:
        """Run a command until Slurm answers; raise SchedulerSilent if it never does.

        The silence of the asked service (`who`) is remembered for the next question to it.
        """
        key = (who, environment.get("SLURM_CONF", ""))
        silent_since, message = self._silent.get(key, (0.0, ""))
        start = self.clock()
        if message and start - silent_since < self.rest:
            raise SchedulerSilent(message)
        tries = 0
        while True:
            tries += 1
            answer, why = self._try(command, environment, timeout or self.answer_timeout)
            if answer is not None and not why:
                self._silent.pop(key, None)
                return answer
            passed = self.clock() - start
            wait = double_wait(tries - 1, self.first_pause) * (1 + self.jitter())
            if not again or passed + wait > self.last_start:
                break
            logger.warning("%s does not answer %s (%s); asking again", who, command[0], why)
            self.sleep(wait)
        often = "once" if tries == 1 else f"{tries} times"
        message = f"{who} does not answer: {why} ({command[0]}, asked {often}, {passed:.0f} s in all)"
        self._silent[key] = (self.clock(), message)
        raise SchedulerSilent(message)

    def _try(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> tuple[Answer | None, str]:
        """Return the answer, and the reason if the service was silent."""
        try:
            answer = self.run(command, environment, timeout)
        except TimeoutError:
            return None, f"no answer within {timeout:.0f} s"
        message = error_text(answer.stderr)
        return answer, message if answer.code != 0 and says_unanswered(message) else ""
