"""srun's own words in the job's log: of a step that never ran, and of one whose end never comes."""

import os
import re
import time
from typing import Callable, List, NamedTuple, Optional, Sequence

from slipway.common.files import open_regular
from slipway.supervisor.hooks import Hook
from slipway.supervisor.job import Job

# With these srun exits with 0 all the same (22.05).
_NEVER_RAN = r"srun: .*(?:aborted before step completely launched|Timed out waiting for job step to complete)"
_ABORTED = (
    r"srun: (?:Job step aborted: Waiting up to ([0-9]{1,5}) seconds for job step to finish"
    r"|(?:launch/slurm: _step_signal: )?Terminating StepId=[0-9_+]+\.([0-9]{1,9})\b)"
)
# Where it says the second alone, its request to end the tasks is itself without an answer.
_UNTOLD_SECONDS = 60
# Beyond what srun itself says that it waits, in seconds. It waits for ever for a node that was started again
# before Slurm missed it.
_PATIENCE = 60
_EVERY = 30.0


class StepLog(NamedTuple):
    """The part of the job's log that belongs to the tasks' step.

    Attributes
    ----------
    log
        Path of the log that srun writes to.
    start
        Size of the log in bytes when the step began.
    """

    log: str
    start: int

    def lines(self) -> List[str]:
        """Return the lines at the end of the log; none where it cannot be read."""
        from slipway.common.node.evidence import TAIL_BYTES  # late: the tasks start sooner

        try:
            with open_regular(self.log) as stream:
                stream.seek(max(self.start, stream.seek(0, 2) - TAIL_BYTES))
                return stream.read(TAIL_BYTES).decode("latin-1").splitlines()
        except OSError:
            return []

    def has_never_run(self) -> bool:
        """Return True if srun says of the step that it was not started as a whole."""
        from slipway.common.node.evidence import find_last_step

        # Text of a log is anybody's: tasks that trained have started, and may call srun themselves.
        lines = self.lines()
        return any(re.match(_NEVER_RAN, line) for line in lines) and find_last_step(lines) is None

    def wait(self, find_number: Callable[[], Optional[int]]) -> Optional[List[int]]:
        """Return the seconds that srun waits for tasks which it has ended, and the bytes in the job's logs.

        ``None`` where it has ended none. `find_number` finds the number of the step: the srun of a task says
        the same of its own.
        """
        matches = [match for match in (re.match(_ABORTED, line) for line in self.lines()) if match]
        seconds = [int(match.group(1)) for match in matches if match.group(1)]
        if not seconds and (not matches or str(find_number()) not in [match.group(2) for match in matches]):
            return None
        logs = [os.path.splitext(self.log)[0] + extension for extension in (".out", ".err")]
        return [
            seconds[0] if seconds else _UNTOLD_SECONDS,
            sum(os.path.getsize(log) for log in logs if os.path.exists(log)),
        ]


def begin_step(job: Job) -> StepLog:
    """Return the step of the tasks that are about to start."""
    for extension in (".err", ".out"):
        path = job.settings.log + job.id + extension
        try:
            with open_regular(path) as stream:
                return StepLog(path, stream.seek(0, 2))
        except OSError:
            continue
    return StepLog(job.settings.log + job.id + ".out", 0)


class Patience:
    """The wait for an srun that has ended its tasks: it is over a minute after srun's own.

    It begins anew as long as anything is written: the words may be those of a task's own srun.
    """

    def __init__(self, step: StepLog, find_number: Callable[[], Optional[int]]) -> None:
        self._deadline = 0.0
        self._size = -1
        self._is_over = False
        self.hook = Hook("srun", lambda job: step.wait(find_number), self._take, every=_EVERY)

    def is_over(self) -> bool:
        """Return True once srun is not to be waited for any longer."""
        return self._is_over

    def _take(self, job: Job, wait: Sequence[int]) -> None:
        seconds, size = wait
        if size != self._size:
            self._size, self._deadline = size, time.monotonic() + seconds + _PATIENCE
        self._is_over = time.monotonic() >= self._deadline
