"""What is read of a run in order to judge it: `launcher.monitor.gathering` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.monitor.curves import Curves
from launcher.schedulers.base import JobStatus


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoints of a run: the step of the newest complete one, and what is wrong with others."""

    directory: str
    step: int | None = None
    name: str | None = None
    wrong: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What was read of a run.

    Attributes
    ----------
    status
        How the job is.
    step, end
        The step that this launch came to, and in its trainer's word why it ended.
    tells_each_step
        Whether the trainer tells of every step, so that a missing one is a hole.
    curves
        Of all launches of the run, up to this one.
    diverged
        What the trainer said of a loss that is not finite, with which it stops.
    ranks, ended_ranks
        How many there are, and which told that they ended; ``None`` where the trainer's ranks do not tell.
    errors
        What ranks, libraries and Slurm told of errors, each with where it stands; ``None`` without a log.
    saved
        ``None`` where no checkpoint was asked for.
    missing_outputs, outputs
        Of a data preparation: files that are not there, and those that are; ``None`` where it is not known
        what they would be.
    """

    stage: str
    status: JobStatus
    job: str
    max_steps: int | None = None
    step: int | None = None
    end: str | None = None
    tells_each_step: bool = True
    curves: Curves = field(default_factory=Curves)
    diverged: str | None = None
    ranks: int = 1
    ended_ranks: frozenset[int] | None = None
    errors: Sequence[str] | None = ()
    saved: Saved | None = None
    outputs: Sequence[str] | None = None
    missing_outputs: Sequence[str] = ()

    @property
    def is_over(self) -> bool:
        return self.status.state.is_final
