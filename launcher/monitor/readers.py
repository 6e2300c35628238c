"""The readers of a launch's events: our trainer's, and NeMo's progress lines in a job's log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from launcher.jobs.launches import Launch
from launcher.monitor.events import (
    Event,
    EventReader,
    Start,
    Train,
    Validation,
    blocks_back,
    read_head_and_tail,
    select_newest,
)
from launcher.monitor.logs import find_log, job_logs
from slipway.common.files import open_regular, read_text


def open_reader(launch: Launch) -> EventReader | LogsReader:
    """Return a reader of all events of a launch that became a job; its files need not exist yet."""
    return LogsReader(launch) if _has_events_in_log(launch) else EventReader(launch.paths.metrics)


def all_events(launch: Launch) -> Iterator[Event]:
    """Yield all events of a launch so far; those of a long one may not fit into memory."""
    return open_reader(launch).stream()


def newest_events(launch: Launch, *, restarted: bool = False) -> list[Event]:
    """Return the events that `launcher.monitor.events.Progress` needs, read quickly."""
    if not _has_events_in_log(launch):
        return read_head_and_tail(launch.paths.metrics, restarted=restarted)
    tokens = tokens_per_step(launch.paths.config)
    # The log of a link that has just begun has no step yet.
    logs = reversed(job_logs(launch)) if launch.is_chain else [find_log(launch)]
    return next((events for log in logs if (events := read_nemo_end(log, tokens))), [])


def _has_events_in_log(launch: Launch) -> bool:
    """Return True if the trainer is NeMo's, which writes its steps to the job's log."""
    return launch.manifest.engine == "nemo" and launch.manifest.job_id is not None


class LogsReader:
    """A reader of NeMo's events from the log of a job, or from the logs of a chain's links in their order."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._tokens = tokens_per_step(launch.paths.config)
        self._readers: dict[Path, NemoReader] = {}

    def newest(self, steps: int) -> list[Event]:
        return select_newest(self.stream(), steps)

    def stream(self) -> Iterator[Event]:
        logs = job_logs(self._launch) if self._launch.is_chain else []
        for log in logs or [find_log(self._launch)]:
            if log not in self._readers:
                self._readers[log] = NemoReader(log, self._tokens)
        for reader in self._readers.values():
            yield from reader.stream()


# --- NeMo's progress lines

# After the bar: without it the number may be the rest of a torn one.
_LINE = re.compile(
    rb"\| *(\d{1,15})/(\d{1,15}) \[((?:\d{1,9}:)?\d{1,9}:\d\d)<"
    rb"[^,\]]*, ([^\[\]\r\n]*global_step=[^\[\]\r\n]*\]?)"
)
# A value torn by another rank's message is not followed by a comma or the bracket.
_METRIC = re.compile(rb"([a-z_]+(?: in s)?)=([^,\]=]+)[,\]]")
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
# Some forty steps.
_TAIL_BYTES = 1 << 14
# A failed job's ranks may write long tracebacks after the last step.
_SEARCH_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 20
# A longer line is no progress line.
_LONGEST_LINE = 1 << 13


@dataclass(frozen=True, slots=True)
class _Point:
    """A progress line; `elapsed` in seconds since the trainer began to fit."""

    step: int
    max_steps: int
    elapsed: int
    metrics: Mapping[str, float]


class NemoReader:
    """A reader of the events appended to a log since the last call; the log need not exist yet.

    With `tokens_per_step` the rate is in tokens; it is ``None`` if it is not known.
    """

    def __init__(self, path: Path, tokens_per_step: int | None = None, offset: int = 0) -> None:
        self.path = path
        self._tokens = tokens_per_step
        self._offset = offset
        self._last: _Point | None = None
        self._validation: str | None = None

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first; their times are counted back from the log's last change."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path, buffering=0) as stream:
            changed = self.path.stat().st_mtime
            begin, self._offset = self._offset, _read_last_end(stream, self._offset)
            newest = _read_last_point(stream, begin, self._offset)
            if newest is not None:
                yield from self._events(_points_between(stream, begin, self._offset), newest, changed)

    def _events(self, points: Iterator[_Point], newest: _Point, now: float) -> Iterator[Event]:
        following = next(points, None)
        while following is not None:
            point, following = following, next(points, None)
            at = now - max(newest.elapsed - point.elapsed, 0)
            before, self._last = self._last, point
            if before is None or point.step < before.step or point.elapsed < before.elapsed:
                self._validation = None
                begin = at - point.elapsed
                yield Start(begin, point.step - 1, point.max_steps, tokens_per_step=self._tokens)
            loss = point.metrics.get("val_loss")
            if loss is not None and str(loss) != self._validation:  # a nan differs from itself
                self._validation = str(loss)
                yield Validation(at, point.step, loss)
            if following is None or following.step != point.step:
                loss, seconds = map(point.metrics.get, ("reduced_train_loss", "train_step_timing in s"))
                speed = self._tokens / seconds if self._tokens and seconds else None
                yield Train(at, point.step, loss, None, None, speed, self._tokens)


def read_nemo_end(log: Path, tokens_per_step: int | None = None) -> list[Event]:
    """Read the newest events of a log from its end."""
    try:
        with open_regular(log, buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            blocks = blocks_back(stream, max(size - _SEARCH_BYTES, 0), size, _TAIL_BYTES)
            offset = next((start for start, block in blocks if b"global_step=" in block), size)
    except FileNotFoundError:
        return []
    return list(NemoReader(log, tokens_per_step, offset).stream())


def tokens_per_step(config: Path) -> int | None:
    """Return the tokens of a step, batch size times sequence length, of a GPT's job; ``None`` if they vary.

    Both are searched for in the text of the configuration: parsing YAML takes a hundred times longer.
    """
    try:
        text = read_text(config)
    except (OSError, ValueError):
        return None
    batch, length, growing = (
        re.search(rf"^  {key}: *(\S+)", text, re.MULTILINE)
        for key in ("global_batch_size", "encoder_seq_length", "rampup_batch_size")
    )
    if not (batch and length) or (growing and growing.group(1) != "null"):
        return None
    sizes = (batch.group(1), length.group(1))
    return int(sizes[0]) * int(sizes[1]) if all(map(_COUNT.fullmatch, sizes)) else None


def _complete_length(content: bytes) -> int:
    """Return the length of the complete lines; the bar's last line has no end but its bracket."""
    return max(content.rfind(end) for end in (b"]", b"\n", b"\r")) + 1


def _read_last_end(stream: BinaryIO, begin: int) -> int:
    """Return the byte up to which a log has complete lines."""
    start = max(stream.seek(0, os.SEEK_END) - _BLOCK_BYTES, begin)
    stream.seek(start)
    return start + _complete_length(stream.read())


def _points_between(stream: BinaryIO, begin: int, end: int) -> Iterator[_Point]:
    """Read the progress lines between two bytes, block by block."""
    stream.seek(begin)
    rest = b""
    while begin < end and (block := stream.read(min(_BLOCK_BYTES, end - begin))):
        begin += len(block)
        content = rest + block
        length = _complete_length(content)
        rest = content[length:][-_LONGEST_LINE:]
        yield from _points(content[:length])


def _read_last_point(stream: BinaryIO, begin: int, end: int) -> _Point | None:
    """Return the last progress line between two bytes, searched for from the end."""
    for _, block in blocks_back(stream, begin, end, _BLOCK_BYTES, overlap=_LONGEST_LINE):
        if points := _points(block):
            return points[-1]
    return None


def _points(content: bytes) -> list[_Point]:
    return [
        _Point(int(match[1]), int(match[2]), _seconds(match[3]), _metrics(match[4]))
        for match in _LINE.finditer(content)
    ]


def _metrics(text: bytes) -> dict[str, float]:
    metrics = {}
    for name, value in _METRIC.findall(text):
        with contextlib.suppress(ValueError):
            metrics[name.decode()] = float(value)
    return metrics


def _seconds(clock: bytes) -> int:
    seconds = 0
    for part in clock.split(b":"):
        seconds = 60 * seconds + int(part)
    return seconds


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
