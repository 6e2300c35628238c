"""The steps of a run by the trainer that computed them: of which launch, and counted from which state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from launcher.jobs.launches import Launch
from launcher.monitor.events import Start, Train
from launcher.monitor.readers import open_reader


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps that a trainer computed after one start.

    Attributes
    ----------
    launch
        The launch that it belongs to.
    after_step, after_samples
        The state from which it went on: the steps completed, and the samples consumed by them.
    last
        The last step that is known to be completed; `after_step` if there is none.
    """

    launch: Launch
    after_step: int
    after_samples: int
    last: int

    @property
    def has_trained(self) -> bool:
        """Return True if it completed a step."""
        return self.last > self.after_step


def segments(launches: Iterable[Launch]) -> list[Segment]:
    """Return the segments of launches of our own trainer, in the order of the launches."""
    return [segment for launch in launches for segment in _of_launch(launch)]


def _of_launch(launch: Launch) -> list[Segment]:
    """Read the segments of a launch; of all but the last one only the first step is looked for."""
    parts: list[Segment] = []
    for event in open_reader(launch).newest(1) if launch.manifest.job_id is not None else ():
        if isinstance(event, Start) and event.consumed_samples is not None:
            parts.append(Segment(launch, event.step, event.consumed_samples, event.step))
        elif isinstance(event, Train) and parts:
            parts[-1] = replace(parts[-1], last=max(parts[-1].last, event.step))
    return parts


def segment_with(step: int, parts: Sequence[Segment]) -> Segment | None:
    """Return the segment whose step is that of the model as it is now.

    A later trainer that went back to an earlier checkpoint makes the model forget the steps after it: the
    last segment that begins before the step counts, also where it has not come so far yet. One that completed
    no step changed nothing, and counts only if no other one does.
    """
    before = [part for part in parts if part.after_step < step]
    trained = [part for part in before if part.has_trained]
    return next(reversed(trained or before), None)
