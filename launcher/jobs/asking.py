"""The times at which a scheduler is asked again: seldom, and soon after files contradict its last answer.

A controller serves thousands of users, and sites limit the calls of each; files tell of most changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.jobs.status import LaunchStatus
from launcher.schedulers.base import JobStatus
from launcher.slurm.states import State
from slipway.common.backoff import double_wait
from slipway.common.node.marks import MARKS, cancelled_by
from slipway.common.node.settings import SLURM

ASK_SECONDS = 30.0
# Between two questions when files contradict the answers; doubled each time while they do.
LEAST_SECONDS = 2.0
_NO_ANSWER_YET = JobStatus(State.PENDING)


class AskingTimes:
    """The times of the questions about some launches."""

    def __init__(self, interval: float = ASK_SECONDS, least: float = LEAST_SECONDS) -> None:
        self._interval, self._least = interval, min(least, interval)
        self._hurried = self._failures = 0
        self._rows: Sequence[LaunchStatus] = ()
        self._seen: dict[Path, tuple[tuple[float, ...], bool]] = {}
        self.asked = 0.0

    def note_answer(self, rows: Sequence[LaunchStatus]) -> None:
        """Note that a question was just answered, or was not, as the rows say."""
        self.asked, self._rows = time.monotonic(), rows
        self._seen.clear()
        self._failures = self._failures + 1 if any(row.unanswered for row in rows) else 0

    def is_due(self) -> bool:
        """Return True if it is time for the next question; looks at the files of the jobs that live."""
        age = time.monotonic() - self.asked
        if self._failures:
            return age >= double_wait(self._failures, self._least, ASK_SECONDS)
        is_late = age >= (self._interval if self._asks_slurm() else self._least)
        if not any(map(self._is_outdated, self._rows)):
            self._hurried = 0 if is_late else self._hurried
            return is_late
        if age < double_wait(self._hurried, self._least, self._interval):
            return False
        self._hurried += 1
        return True

    def _asks_slurm(self) -> bool:
        launches = (row.launch for row in self._rows if not row.state.is_final)
        return any(launch is not None and launch.manifest.scheduler == SLURM for launch in launches)

    def _is_outdated(self, row: LaunchStatus) -> bool:
        """Return `is_outdated` of a row; files are read only after something changed in their directories."""
        if row.launch is None or not row.state.is_live:
            return False
        changed = tuple(map(_change_time, (row.directory, row.directory / MARKS)))
        if self._seen.get(row.directory, ((), False))[0] != changed:
            self._seen[row.directory] = changed, is_outdated(row)
        return self._seen[row.directory][1]


def is_outdated(status: LaunchStatus) -> bool:
    """Return True if the files of a launch say that a job began or ended, and its status does not."""
    launch, job_id = status.launch, status.job_id
    if launch is None or job_id is None or not status.state.is_live:
        return False
    if cancelled_by(launch.paths.directory, job_id) is not None:
        return True
    jobs = status.chain.jobs if status.chain else {launch.job: status}
    newest = {attempt.job_id: attempt for attempt in launch.attempts}
    for attempt in newest.values():
        job = jobs.get(attempt.job_id) or jobs.get(attempt.job_id.partition("_")[0], _NO_ANSWER_YET)
        state = job.tasks.get(attempt.task or "", job.state)
        told = (State.RUNNING, State.COMPLETING) if attempt.is_over else (State.PENDING,)
        # A job of a second began and ended since the last answer.
        is_behind = state in told or (state is State.PENDING and attempt.job_id in jobs)
        if is_behind and attempt.number >= job.restarts:
            return True
    is_new = status.state is State.PENDING and not status.restarts and job_id not in newest
    return is_new and _change_time(launch.paths.log(job_id)) > 0


def _change_time(path: Path) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0
