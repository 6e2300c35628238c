"""Asking a scheduler that may be busy: again, at growing intervals, and not for ever.

Slurm's own commands are patient too: they try for 9 s where nobody listens, and for MessageTimeout (10 s
unless the site says otherwise) where nobody answers; squeue of a single job does so twice. So a dead
controller gets one more try at most.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.schedulers.commands import Answer, Silent, run, words
from launcher.schedulers.failures import is_not_answered

logger = logging.getLogger("launcher.schedulers")

Run = Callable[[Sequence[str], Mapping[str, str], float], Answer]


def _random() -> float:
    """A number between 0 and 1. Not the module `random`: importing it takes longer than a question."""
    return os.urandom(1)[0] / 255


@dataclass(slots=True)
class Patience:
    """How long to go on asking; all times in seconds.

    Parameters
    ----------
    first_pause
        Between the first try and the second; it doubles from then on, with a random part, so that those who
        wait do not all come back at once.
    last_start
        No try begins later than this after the first.
    answer_timeout
        How long one try may take.
    rest
        How long a scheduler that did not answer is left alone: who asks it sooner is told the same again.
    """

    first_pause: float = 0.5
    last_start: float = 10.0
    answer_timeout: float = 20.0
    rest: float = 10.0
    run: Run = run
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = _random
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
        """Run a command until it is answered.

        Parameters
        ----------
        who
            Whom the command asks: its silence is remembered for the next question to it.
        timeout
            Instead of `answer_timeout`.
        again
            Whether to ask again.

        Raises
        ------
        Silent
            If nobody answers; with how often and how long it was tried.
        """
        key = (who, environment.get("SLURM_CONF", ""))
        silent_since, told = self._silent.get(key, (0.0, ""))
        start = self.clock()
        if told and start - silent_since < self.rest:
            raise Silent(told)
        pause, tries = self.first_pause, 0
        while True:
            tries += 1
            answer, why = self._try(command, environment, timeout or self.answer_timeout)
            if answer is not None and not why:
                self._silent.pop(key, None)
                return answer
            passed = self.clock() - start
            wait = pause * (1 + self.jitter())
            if not again or passed + wait > self.last_start:
                break
            logger.warning("%s does not answer %s (%s); asking again", who, command[0], why)
            self.sleep(wait)
            pause *= 2
        often = "once" if tries == 1 else f"{tries} times"
        told = f"{who} does not answer: {why} ({command[0]}, asked {often}, {passed:.0f} s in all)"
        self._silent[key] = (self.clock(), told)
        raise Silent(told)

    def _try(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> tuple[Answer | None, str]:
        """The answer, and why it is none."""
        try:
            answer = self.run(command, environment, timeout)
        except TimeoutError:
            return None, f"nothing within {timeout:.0f} s"
        told = words(answer.stderr)
        return answer, told if answer.code != 0 and is_not_answered(told) else ""
