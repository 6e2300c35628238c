"""The bounded memory of a run, which its detectors look at."""

import math
import os
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple, Union

from slipway.common.node.events import Event, Start, Train
from slipway.common.node.slurm_states import FINAL
from slipway.watch.pace import Pace, Schedule
from slipway.watch.parameters import Parameters
from slipway.watch.series import Speeds, Spikes

# Four hours.
_DISK_SAMPLES, _DISK_SPACING = 48, 300.0
_CHECKPOINTS = 8
# Finite losses in a row that end a stretch of others.
_CALM = 20
_MOST_SKIPS = 1000


class DiskSpace(NamedTuple):
    """Bytes of a file system: free for the user, and in total."""

    free: int
    total: int


class ChainState(NamedTuple):
    """The place of the present job in its chain.

    `has_successor` says that the next link is in the queue, `ends_at` is the Unix time of the job's time
    limit; each is ``None`` if nobody can say.
    """

    link: int
    links: int
    has_successor: Optional[bool] = None
    ends_at: Optional[float] = None


class JobState(NamedTuple):
    """The newest job: its state in Slurm's words, ``None`` if Slurm does not know it, and its end mark.

    `began` is the Unix time since when it runs, ``None`` if it does not or nobody can say.
    """

    state: Optional[str]
    has_end_mark: bool
    began: Optional[float] = None


class Facts(NamedTuple):
    """Facts besides events that a watcher found at a Unix time; a text says why it could not look.

    `checkpoint` is the step of the newest complete one, 0 without any.
    """

    time: float
    checkpoint: Union[int, str] = "nobody looked at the checkpoints"
    disk: Union[DiskSpace, str] = "nobody looked at the disk"
    chain: Union[ChainState, str] = "nobody looked at the chain"
    job: Union[JobState, str] = "nobody asked for the job"


class Window:
    """The memory of a run; it takes events and facts in the order of their times.

    Attributes
    ----------
    now
        The time of the newest event or facts.
    pace, loss, grad_norm, speeds
        The times of steps, and the series of their values.
    non_finite, skipped
        The first step of the newest losses that are not finite, until finite ones follow; and the last steps
        in a row whose norm of the gradient is not finite.
    disk, checkpoints
        Times and free bytes, and steps, that the last facts named.
    conditions
        What the facts say is wrong, each with the time since when.
    since
        The detectors that fired at the last reading, each with the time since when.
    """

    def __init__(self, parameters: Parameters, schedule: Schedule) -> None:
        self.now = 0.0
        self.facts = Facts(0.0)
        self.pace = Pace(schedule)
        self.loss = Spikes(parameters.loss_spike)
        self.grad_norm = Spikes(parameters.grad_norm_spike)
        self.speeds = Speeds(parameters.throughput)
        self.non_finite: Optional[Train] = None
        self.skipped: List[Train] = []
        self.disk: Deque[Tuple[float, int]] = deque(maxlen=_DISK_SAMPLES)
        self.checkpoints: Deque[int] = deque(maxlen=_CHECKPOINTS)
        self.conditions: Dict[str, float] = {}
        self.since: Dict[str, float] = {}
        self._finite = 0

    def take(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Train):
            self._take_loss(event)
            self._take_grad_norm(event)
            self._take_speed(event)
        elif isinstance(event, Start):
            self._take_start(event)
        self.pace.take(event)
        self.now = max(self.now, self.pace.last_sign or 0.0)

    def _take_start(self, event: Start) -> None:
        before = self.pace.start or event
        self.loss.restart(forget=event.step == 0)
        self.grad_norm.restart(forget=event.step == 0)
        has_changed = (before.data, before.tokens_per_step) != (event.data, event.tokens_per_step)
        self.speeds.restart(forget=has_changed)
        self.non_finite = None
        self.skipped = []

    def _take_loss(self, event: Train) -> None:
        if event.loss is None:
            return
        if not math.isfinite(event.loss):
            self.non_finite, self._finite = self.non_finite or event, 0
            return
        self._finite += 1
        if self._finite >= _CALM:
            self.non_finite = None
        self.loss.take(event.time, event.step, event.loss)

    def _take_grad_norm(self, event: Train) -> None:
        if event.grad_norm is None:
            return
        if math.isfinite(event.grad_norm):
            self.skipped = []
            self.grad_norm.take(event.time, event.step, event.grad_norm)
        elif self.grad_norm.last and len(self.skipped) < _MOST_SKIPS:
            self.skipped.append(event)

    def _take_speed(self, event: Train) -> None:
        before, speed = self.pace.train, event.tokens_per_second
        if before is None:
            return  # the first step is slow
        if speed is None and event.time > before.time and event.step > before.step:
            speed = (event.step - before.step) / (event.time - before.time)
        if speed is not None and math.isfinite(speed):
            self.speeds.take(event.time, speed)

    def take_facts(self, facts: Facts) -> None:
        """Take in what a watcher found."""
        self.facts = facts
        # Not the largest time ever seen: a clock that was set back would be ahead of all events to come.
        self.now = max(facts.time, self.pace.last_sign or 0.0)
        checkpoint, disk, chain, job = facts.checkpoint, facts.disk, facts.chain, facts.job
        if isinstance(checkpoint, int) and checkpoint not in self.checkpoints:
            self.checkpoints.append(checkpoint)
        if isinstance(disk, DiskSpace) and not (self.disk and facts.time < self.disk[-1][0] + _DISK_SPACING):
            self.disk.append((facts.time, disk.free))
        if isinstance(chain, ChainState):
            self._set_condition("chain", chain.link < chain.links and chain.has_successor is False)
        if isinstance(job, JobState):
            is_gone = job.state is None or job.state in FINAL - {"CANCELLED"}
            self._set_condition("job", is_gone and not job.has_end_mark)

    def _set_condition(self, name: str, holds: bool) -> None:
        if holds:
            self.conditions.setdefault(name, self.facts.time)
        else:
            self.conditions.pop(name, None)


def measure_disk(directory: str) -> Union[DiskSpace, str]:
    """Return the space of a directory's file system, or why it is not known."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return f"the disk of {directory} cannot be asked: {error.strerror}"
    return DiskSpace(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)
