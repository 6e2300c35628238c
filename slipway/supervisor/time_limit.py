"""The time limit that Slurm granted, and when the tasks save for it.

A site's filter, a partition, ``--time-min`` and ``scontrol update`` set another limit than was asked for.
Where it is so short that Slurm's signal comes at the job's beginning, the tasks get the signal to save later.
"""

import signal
import time
from typing import Optional

from slipway.supervisor.job import Job
from slipway.supervisor.slurm import Slurm

# The part of a short limit that is left for saving, as the launcher has it.
_MARGIN_PART = 4
# Slurm may send its signal this much earlier, in seconds.
_EARLY = 60


class TimeLimit:
    """The granted limit of a job in `seconds`; ``None`` if unlimited or not known."""

    def __init__(self, job: Job, slurm: Slurm) -> None:
        self._job, self.slurm = job, slurm
        self._margin = job.settings.save_before_end or 0
        self._end = 0
        self._is_held = False
        self.seconds: Optional[int] = None
        # Unix time of the signal to save, if Slurm's comes too early.
        self._due: Optional[float] = None

    def ask(self) -> None:
        """Ask Slurm for the limit."""
        record = self.slurm.show_job(self.slurm.job_id)
        if record is None:
            return
        self._due = None
        if not record.time_limit or not record.end or record.preempted[:1].isdigit():
            return
        self.seconds, self._end, asked = record.time_limit, record.end, self._job.settings.time_limit
        lead = max(1, self.seconds // _MARGIN_PART)
        if self._margin > lead and (asked is None or self.seconds < asked):
            self._due = self._end - lead

    def pause(self) -> Optional[float]:
        """Return the seconds until the signal to save; ``None`` if Slurm sends it."""
        return None if self._due is None else max(0.0, self._due - time.time())

    def turn(self, number: Optional[int]) -> Optional[int]:
        """Replace a received signal, or None: at its time by the signal to save."""
        if self._due is None or number not in (None, signal.SIGCHLD, signal.SIGUSR1):
            return number
        is_slurms = not self._is_held and self._end - time.time() <= self._margin + _EARLY
        if number == signal.SIGUSR1 and is_slurms:
            self.ask()  # it may be another by now
        is_due = self._due is None or time.time() >= self._due
        if is_due or (number == signal.SIGUSR1 and not is_slurms):
            self._due = None
            return signal.SIGUSR1
        if number == signal.SIGUSR1:
            self._is_held = True
            left = round(self._end - (self._due or 0))
            self._job.say(
                f"Slurm granted {self.seconds} seconds: the tasks save {left} seconds before the end"
            )
            return None
        return number
