"""The readers of a launch's events: our trainer's, and those that other engines write to a job's log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from launcher.jobs.launches import Launch
from launcher.monitor.logs import find_log, job_logs
from slipway.common.files import read_text
from slipway.common.node.events import (
    Event,
    EventReader,
    Loads,
    Start,
    Train,
    read_head_and_tail,
    select_newest,
)
from slipway.common.node.progress_lines import READERS, UNKNOWN_SIZES, ProgressReader, TrainingSizes
from slipway.common.node.tensorboard import TAGS, TensorboardReader

_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)


def open_reader(launch: Launch) -> EventReader | LogsReader:
    """Return a reader of all events of a launch that became a job; its files need not exist yet."""
    return LogsReader(launch) if _has_events_in_log(launch) else EventReader(launch.paths.metrics)


def all_events(launch: Launch) -> Iterator[Event]:
    """Yield all events of a launch so far; those of a long one may not fit into memory."""
    if _has_events_in_log(launch):
        return LogsReader(launch).stream()
    return EventReader(launch.paths.metrics).stream(_fast_loads())


def _fast_loads() -> Loads:
    try:
        from orjson import loads  # six times as fast, and imported in 40 ms
    except ImportError:
        return json.loads
    return loads


def newest_events(launch: Launch, *, restarted: bool = False) -> list[Event]:
    """Return the events that `launcher.monitor.progress.Progress` needs, read quickly."""
    if not _has_events_in_log(launch):
        return read_head_and_tail(launch.paths.metrics, restarted=restarted)
    reader, sizes = READERS[launch.manifest.engine], training_sizes(launch.paths.config)
    # The log of a link that has just begun has no step yet.
    logs = reversed(job_logs(launch)) if launch.is_chain else [find_log(launch)]
    events = next((events for log in logs if (events := reader(log, sizes).read_end())), [])
    return events or _tensorboard_reader(launch, sizes).read_end()


def first_and_newest_events(launch: Launch) -> list[Event]:
    """Return the newest events after the first one, with the step from which the training began."""
    newest = newest_events(launch)
    # The end of a log does not say it; the ends of our trainer's file do.
    first = islice(LogsReader(launch).stream(), 1) if newest and _has_events_in_log(launch) else ()
    return [*first, *newest]


def _has_events_in_log(launch: Launch) -> bool:
    return launch.manifest.engine in READERS and launch.manifest.job_id is not None


def _tensorboard_reader(launch: Launch, sizes: TrainingSizes) -> TensorboardReader:
    return TensorboardReader(launch.paths.results, TAGS[launch.manifest.engine], sizes)


class LogsReader:
    """A reader of the events in the log of a job, or in the logs of a chain's links in their order.

    Where no log has any, those in TensorBoard's files count.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._sizes = training_sizes(launch.paths.config)
        self._readers: dict[Path, ProgressReader] = {}
        self._has_lines = False
        self._tensorboard = _tensorboard_reader(launch, self._sizes)

    def newest(self, steps: int) -> list[Event]:
        return select_newest(self.stream(), steps)

    def stream(self) -> Iterator[Event]:
        logs = job_logs(self._launch) if self._launch.is_chain else []
        for log in logs or [find_log(self._launch)]:
            if log not in self._readers:
                self._readers[log] = READERS[self._launch.manifest.engine](log, self._sizes)
        for reader in self._readers.values():
            for event in reader.stream():
                self._has_lines = True
                yield event
        if not self._has_lines:
            yield from self._tensorboard.stream()


def training_sizes(config: Path) -> TrainingSizes:
    """Return the steps of a training and its batch size, and the sequence length of a GPT or BERT.

    They are searched for in the text of the configuration: parsing YAML takes a hundred times longer.
    """
    try:
        text = read_text(config)
    except (OSError, ValueError):
        return UNKNOWN_SIZES
    steps, batch, length, growing = (
        match[1] if (match := re.search(rf"^  {key}: *(\S+)", text, re.MULTILINE)) else "null"
        for key in ("max_steps", "global_batch_size", "encoder_seq_length", "rampup_batch_size")
    )
    values = (steps, batch if growing == "null" else growing, length)
    return TrainingSizes(*(int(value) if _COUNT.fullmatch(value) else None for value in values))


# --- the steps of a run


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps that a trainer computed after one start.

    `after_step` and `after_samples` are the steps completed before it, and the samples consumed by them.
    `last` is the last step that is known to be completed, else `after_step`.
    """

    launch: Launch
    after_step: int
    after_samples: int
    last: int


def segments(launches: Iterable[Launch]) -> list[Segment]:
    """Return the segments of launches of our trainer, in order; only a launch's last is read to its end."""
    all_parts: list[Segment] = []
    for launch in launches:
        parts: list[Segment] = []
        for event in open_reader(launch).newest(1) if launch.manifest.job_id is not None else ():
            if isinstance(event, Start) and event.consumed_samples is not None:
                parts.append(Segment(launch, event.step, event.consumed_samples, event.step))
            elif isinstance(event, Train) and parts:
                parts[-1] = replace(parts[-1], last=max(parts[-1].last, event.step))
        all_parts += parts
    return all_parts


def segment_with(step: int, parts: Sequence[Segment]) -> Segment | None:
    """Return the segment whose step is that of the present model.

    A later trainer that went back to an earlier checkpoint makes the model forget the steps after it: the
    last segment that begins before the step counts, also where it has not come so far yet. One that completed
    no step changed nothing, and counts only if no other one does.
    """
    before = [part for part in parts if part.after_step < step]
    trained = [part for part in before if part.last > part.after_step]
    return next(reversed(trained or before), None)
