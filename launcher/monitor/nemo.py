r"""NeMo's progress lines in a job's log, read as the same events that our trainer writes.

On stdout NeMo redraws one line, with ``\r``, twice a step: first the bar advances, then the metrics follow::

    Epoch 0: :  40%|████      | 2/5 [00:22<00:33, reduced_train_loss=9.030, global_step=1.000,
    consumed_samples=4.000, train_step_timing in s=0.0691, val_loss=9.030]

The bar counts completed steps, over all launches; ``global_step`` counts from 0 and has four digits like all
metrics, so that a large one is rounded. Other ranks' messages may stand in the middle of a line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.monitor.events import Event, Start, Train, Validation
from supervisor.files import open_regular, read_text

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

    Parameters
    ----------
    tokens_per_step
        With it the rate is in tokens; ``None`` if it is not known.
    """

    def __init__(self, path: Path, tokens_per_step: int | None = None, offset: int = 0) -> None:
        self.path = path
        self._tokens = tokens_per_step
        self._offset = offset
        self._last: _Point | None = None
        self._validation: str | None = None

    def poll(self) -> list[Event]:
        """Return the new events, oldest first."""
        return list(self.stream())

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first.

        Their times are counted back from the log's last change.
        """
        try:
            with open_regular(self.path, buffering=0) as stream:
                changed = self.path.stat().st_mtime
                begin, self._offset = self._offset, _last_end(stream, self._offset)
                newest = _last_point(stream, begin, self._offset)
                if newest is not None:
                    points = _points_between(stream, begin, self._offset)
                    yield from self._events(points, newest, changed)
        except FileNotFoundError:
            return

    def _events(self, points: Iterator[_Point], newest: _Point, now: float) -> Iterator[Event]:
        following = next(points, None)
        while following is not None:
            point, following = following, next(points, None)
            at = now - max(newest.elapsed - point.elapsed, 0)
            before, self._last = self._last, point
            if before is None or point.step < before.step or point.elapsed < before.elapsed:
                self._validation = None
                yield self._start(point, at)
            loss = point.metrics.get("val_loss")
            if loss is not None and str(loss) != self._validation:  # a nan differs from itself
                self._validation = str(loss)
                yield Validation(at, point.step, loss)
            if following is None or following.step != point.step:
                yield self._train(point, at)

    def _start(self, point: _Point, at: float) -> Start:
        nothing = (None,) * 6
        return Start(at - point.elapsed, point.step - 1, point.max_steps, *nothing, self._tokens)

    def _train(self, point: _Point, at: float) -> Train:
        seconds = point.metrics.get("train_step_timing in s")
        speed = self._tokens / seconds if self._tokens and seconds else None
        return Train(at, point.step, point.metrics.get("reduced_train_loss"), None, None, speed, self._tokens)


def read_nemo_end(log: Path, tokens_per_step: int | None = None) -> list[Event]:
    """Read the newest events of a log from its end."""
    try:
        with open_regular(log, buffering=0) as stream:
            offset = _before_last_progress(stream)
    except FileNotFoundError:
        return []
    return NemoReader(log, tokens_per_step, offset).poll()


def _before_last_progress(stream: BinaryIO) -> int:
    """Return the byte from which the last progress lines are read."""
    end = size = stream.seek(0, 2)
    while end > max(size - _SEARCH_BYTES, 0):
        start = max(end - _TAIL_BYTES, 0)
        stream.seek(start)
        if b"global_step=" in stream.read(end - start):
            return start
        end = start
    return size


def tokens_per_step(config: Path) -> int | None:
    """Return the tokens of a step from the configuration of a GPT's job; ``None`` if they vary.

    They are the global batch size times the sequence length. Both are searched for in the text: parsing YAML
    takes a hundred times longer.
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
    """Return the length of the complete lines: an incomplete one waits for its rest.

    The bar's last line has no end but its bracket.
    """
    return max(content.rfind(end) for end in (b"]", b"\n", b"\r")) + 1


def _last_end(stream: BinaryIO, begin: int) -> int:
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


def _last_point(stream: BinaryIO, begin: int, end: int) -> _Point | None:
    """Return the last progress line between two bytes, searched for from the end."""
    after = b""
    while end > begin:
        start = max(end - _BLOCK_BYTES, begin)
        stream.seek(start)
        block = stream.read(end - start)
        points = _points(block + after)
        if points:
            return points[-1]
        end, after = start, block[:_LONGEST_LINE]
    return None


def _points(content: bytes) -> list[_Point]:
    return [
        _Point(int(match[1]), int(match[2]), _seconds(match[3]), _metrics(match[4]))
        for match in _LINE.finditer(content)
    ]


def _metrics(text: bytes) -> dict[str, float]:
    metrics = {}
    for name, value in _METRIC.findall(text):
        try:
            metrics[name.decode()] = float(value)
        except ValueError:
            continue
    return metrics


def _seconds(clock: bytes) -> int:
    seconds = 0
    for part in clock.split(b":"):
        seconds = 60 * seconds + int(part)
    return seconds
