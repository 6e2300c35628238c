"""The events of a training in the lines that NeMo writes to a job's log."""

import contextlib
import os
import re
from typing import BinaryIO, Dict, Iterator, List, Mapping, NamedTuple, Optional

from slipway.common.files import AnyPath, blocks_back, open_regular
from slipway.common.node.events import Event, Start, Train, Validation

# After the bar: without it the number may be the rest of a torn one.
_LINE = re.compile(
    rb"\| *(\d{1,15})/(\d{1,15}) \[((?:\d{1,9}:)?\d{1,9}:\d\d)<"
    rb"[^,\]]*, ([^\[\]\r\n]*global_step=[^\[\]\r\n]*\]?)"
)
# A value torn by another rank's message is not followed by a comma or the bracket.
_METRIC = re.compile(rb"([a-z_]+(?: in s)?)=([^,\]=]+)[,\]]")
# Some forty steps.
_TAIL_BYTES = 1 << 14
# A failed job's ranks may write long tracebacks after the last step.
_SEARCH_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 20
# A longer line is no progress line.
_LONGEST_LINE = 1 << 13


class _Point(NamedTuple):
    """A progress line; `elapsed` in seconds since the trainer began to fit."""

    step: int
    max_steps: int
    elapsed: int
    metrics: Mapping[str, float]


class NemoReader:
    """A reader of the events appended to a log since the last call; the log need not exist yet.

    With `tokens_per_step` the rate is in tokens; it is ``None`` if it is not known.
    """

    def __init__(self, path: AnyPath, tokens_per_step: Optional[int] = None, offset: int = 0) -> None:
        self.path = path
        self._tokens = tokens_per_step
        self._offset = offset
        self._last: Optional[_Point] = None
        self._validation: Optional[str] = None

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first; their times are counted back from the log's last change."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path, buffering=0) as stream:
            changed = os.stat(self.path).st_mtime
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


def read_nemo_end(log: AnyPath, tokens_per_step: Optional[int] = None) -> List[Event]:
    """Read the newest events of a log from its end."""
    try:
        with open_regular(log, buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            blocks = blocks_back(stream, max(size - _SEARCH_BYTES, 0), size, _TAIL_BYTES)
            offset = next((start for start, block in blocks if b"global_step=" in block), size)
    except FileNotFoundError:
        return []
    return list(NemoReader(log, tokens_per_step, offset).stream())


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
    while begin < end:
        block = stream.read(min(_BLOCK_BYTES, end - begin))
        if not block:
            return
        begin += len(block)
        content = rest + block
        length = _complete_length(content)
        rest = content[length:][-_LONGEST_LINE:]
        yield from _points(content[:length])


def _read_last_point(stream: BinaryIO, begin: int, end: int) -> Optional[_Point]:
    """Return the last progress line between two bytes, searched for from the end."""
    for _, block in blocks_back(stream, begin, end, _BLOCK_BYTES, overlap=_LONGEST_LINE):
        points = _points(block)
        if points:
            return points[-1]
    return None


def _points(content: bytes) -> List[_Point]:
    return [
        _Point(int(match.group(1)), int(match.group(2)), _seconds(match.group(3)), _metrics(match.group(4)))
        for match in _LINE.finditer(content)
    ]


def _metrics(text: bytes) -> Dict[str, float]:
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
