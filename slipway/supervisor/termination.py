"""Ending the tasks: by a detector's verdict, or because their launch is lost."""

import signal
import time
from typing import TYPE_CHECKING, Iterator, Optional, Tuple

from slipway.common.node.marks import quote
from slipway.common.node.settings import LOCAL, SLURM, why_lost
from slipway.supervisor.hooks import Hook, Verdict
from slipway.supervisor.job import Job
from slipway.supervisor.tasks import map_signals

if TYPE_CHECKING:
    from slipway.supervisor.slurm import Slurm

# Seconds between two looks for the launch; after as many in vain the tasks are killed, as a file system may
# be away.
_LOOK_SECONDS, _LOOKS = 20.0, 2
# Seconds for saving, where the settings name none, and for leaving.
_SAVE_SECONDS, _LEAVE_SECONDS = 300, 30


class Termination:
    """The signals that end the tasks, in order.

    Attributes
    ----------
    verdict
        The verdict for which they end; ``None`` if no detector ended them.
    hook
        The look for the launch, which may be deleted, or another's by now.
    """

    def __init__(self, job: Job, slurm: "Slurm") -> None:
        self._job, self._slurm = job, slurm
        self._misses = 0
        self._steps: Iterator[Tuple[int, float]] = iter(())
        self._due: Optional[float] = None
        self.verdict: Optional[Verdict] = None
        self.hook = Hook("its launch", why_launch_lost, self._take, every=_LOOK_SECONDS)

    def begin(self, verdict: Verdict) -> None:
        """End the tasks for a reason."""
        self._job.say(f"ends the tasks: {quote(verdict.why)}")
        self.verdict, self._due = verdict, time.monotonic()
        self._steps = self._iterate_signals(verdict.saves)

    def pause(self) -> Optional[float]:
        """Return the seconds until the next signal is due; ``None`` if none is."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def signal(self) -> Optional[int]:
        """Return the signal that the tasks are to be sent now, if any."""
        is_lost = self._misses >= _LOOKS
        if not is_lost and (self._due is None or time.monotonic() < self._due):
            return None
        number, seconds = (signal.SIGKILL, 0) if is_lost else next(self._steps)
        if number == signal.SIGKILL and self._job.settings.scheduler == SLURM:
            self._slurm.kill_steps()
        self._due = time.monotonic() + seconds if self.verdict else None
        return number

    def _iterate_signals(self, saves: bool) -> Iterator[Tuple[int, float]]:
        """Yield the signals, each with the seconds until the next one."""
        settings = self._job.settings
        save = map_signals(settings.scheduler, settings.save_signal)[signal.SIGUSR1][1]
        if saves and settings.save_signal and save:
            yield save, settings.save_before_end or _SAVE_SECONDS
        if settings.scheduler != LOCAL or not settings.save_signal:
            yield signal.SIGTERM, _LEAVE_SECONDS  # srun kills its tasks, a trainer by itself would save
        while True:
            yield signal.SIGKILL, _LEAVE_SECONDS

    def _take(self, job: Job, why: str) -> None:
        self._misses = self._misses + 1 if why else 0


def why_launch_lost(job: Job) -> str:
    """Return why the job's launch is no longer there, or ``""``."""
    return why_lost(job.directory, job.settings.tag)
