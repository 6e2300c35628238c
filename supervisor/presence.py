"""The launch of a job in its directory: a run may be deleted, moved or launched anew while its job runs.

Such a job saves nothing any more and ends: the next training of the run would go on from its weights.
"""

from typing import TYPE_CHECKING, Any

from supervisor.hooks import Hook
from supervisor.job import Job
from supervisor.settings import SLURM, why_lost

if TYPE_CHECKING:
    from supervisor.slurm import Slurm

_EVERY = 20.0
# A file system that is away for a moment has no directory either.
_LOOKS = 2


class Watch:
    """The look for the launch while its tasks run."""

    def __init__(self) -> None:
        self._misses = 0
        self.hook = Hook("its launch", _look, self._take, every=_EVERY)

    def is_over(self, job: Job, slurm: "Slurm") -> bool:
        """Return True once the tasks have to be killed; those on other nodes are killed."""
        is_lost = self._misses >= _LOOKS
        if is_lost and job.settings.scheduler == SLURM:
            slurm.kill_steps()
        return is_lost

    def _take(self, job: Job, why: Any) -> None:
        self._misses = self._misses + 1 if why else 0


def _look(job: Job) -> str:
    return why_lost(job.directory, job.settings.tag)
