"""The events of a training in the lines of a job's log, for engines that write no file of events.

`READERS` has the reader of each of them: NeMo's progress bar, and what ``training_log`` and
``evaluate_and_print_results`` of Megatron-LM, of Megatron-Bridge and of their forks print.
"""

import calendar
import contextlib
import copy
import math
import os
import re
import time
from functools import lru_cache
from typing import BinaryIO, Dict, Iterable, Iterator, List, Mapping, Match, NamedTuple, Optional, Tuple, Type

from slipway.common.files import AnyPath, blocks_back, open_regular, read_int
from slipway.common.node.events import End, Event, Start, Train, Validation, find_last_line

# Some forty steps.
_TAIL_BYTES = 1 << 14
# A failed job's ranks may write long tracebacks after the last step.
_SEARCH_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 20
# A longer line is no progress line.
_LONGEST_LINE = 1 << 13


class TrainingSizes(NamedTuple):
    """The steps of a training, the samples of a step and the tokens of a sample.

    Each is ``None`` if it is not known, or varies.
    """

    steps: Optional[int] = None
    samples: Optional[int] = None
    tokens: Optional[int] = None

    @property
    def tokens_per_step(self) -> Optional[int]:
        return self.samples * self.tokens if self.samples and self.tokens else None


UNKNOWN_SIZES = TrainingSizes()


class ProgressReader:
    """A reader of the events appended to a log since the last call; the log need not exist yet.

    Attributes
    ----------
    step_words, validation_words
        Words of each line of a step, and of each line of a validation where these are lines of their own.
    line_ends
        Bytes after which a line is complete.
    """

    step_words = b""
    validation_words = b""
    line_ends: Tuple[bytes, ...] = (b"\n",)

    def __init__(self, path: AnyPath, sizes: TrainingSizes = UNKNOWN_SIZES) -> None:
        self.path = path
        self._sizes = sizes
        self._offset = 0

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path, buffering=0) as stream:
            changed = os.stat(self.path).st_mtime
            begin, self._offset = self._offset, self._find_last_end(stream, self._offset)
            yield from self._read(stream, begin, changed)

    def read_end(self) -> List[Event]:
        """Return the newest events from the end of a log of which nothing was read yet."""
        try:
            with open_regular(self.path, buffering=0) as stream:
                size = stream.seek(0, os.SEEK_END)
                blocks = blocks_back(stream, max(size - _SEARCH_BYTES, 0), size, _TAIL_BYTES)
                last = next((start for start, block in blocks if self.step_words in block), size)
                self._offset = max(last - _LONGEST_LINE, 0)  # a line that ends in the block began before
                words = self.validation_words
                validation = find_last_line(stream, words, self._offset) if words else b""
        except FileNotFoundError:
            return []
        events = list(self.stream())
        first = events[0] if events else None
        if isinstance(first, Start) and not any(isinstance(event, Validation) for event in events):
            before = (event for event in self._parse(validation) if isinstance(event, Validation))
            events[:0] = [event._replace(time=first.time) for event in before]
        return events

    def _read(self, stream: BinaryIO, begin: int, changed: float) -> Iterator[Event]:
        """Yield the events of the complete lines from a byte on; `changed` is when the log last changed."""
        raise NotImplementedError

    def _parse(self, lines: bytes) -> Iterator[Event]:
        """Yield the events of complete lines that stand alone."""
        return iter(())

    def _find_last_end(self, stream: BinaryIO, begin: int) -> int:
        """Return the byte up to which a log has complete lines."""
        start = max(stream.seek(0, os.SEEK_END) - _BLOCK_BYTES, begin)
        stream.seek(start)
        return start + self._complete_length(stream.read())

    def _complete_length(self, content: bytes) -> int:
        return max(content.rfind(end) for end in self.line_ends) + 1

    def _lines_from(self, stream: BinaryIO, begin: int) -> Iterator[bytes]:
        """Read the complete lines from a byte on, many at a time."""
        stream.seek(begin)
        rest = b""
        while begin < self._offset:
            block = stream.read(min(_BLOCK_BYTES, self._offset - begin))
            if not block:
                return
            begin += len(block)
            content = rest + block
            length = self._complete_length(content)
            rest = content[length:][-_LONGEST_LINE:]
            yield content[:length]

    def _blocks_back(self, stream: BinaryIO, begin: int) -> Iterator[bytes]:
        """Read the lines from a byte on, the last ones first; some of them twice."""
        for _, block in blocks_back(stream, begin, self._offset, _BLOCK_BYTES, overlap=_LONGEST_LINE):
            yield block


# --- NeMo

# After the bar: without it the number may be the rest of a torn one.
_LINE = re.compile(
    rb"\| *(\d{1,15})/(\d{1,15}) \[((?:\d{1,9}:)?\d{1,9}:\d\d)<"
    rb"[^,\]]*, ([^\[\]\r\n]*global_step=[^\[\]\r\n]*\]?)"
)
# A value torn by another rank's message is not followed by a comma or the bracket.
_METRIC = re.compile(rb"([a-z_]+(?: in s)?)=([^,\]=]+)[,\]]")


class _Point(NamedTuple):
    """A progress line; `elapsed` in seconds since the trainer began to fit."""

    step: int
    max_steps: int
    elapsed: int
    metrics: Mapping[str, float]


class NemoReader(ProgressReader):
    """A reader of NeMo's progress bar, whose times are counted back from the log's last change."""

    step_words = b"global_step="
    line_ends = (b"]", b"\n", b"\r")  # the bar's last line has no end but its bracket

    def __init__(self, path: AnyPath, sizes: TrainingSizes = UNKNOWN_SIZES) -> None:
        super().__init__(path, sizes)
        self._tokens = sizes.tokens_per_step
        self._last: Optional[_Point] = None
        self._validation: Optional[str] = None

    def _read(self, stream: BinaryIO, begin: int, changed: float) -> Iterator[Event]:
        newest = next(
            (points[-1] for points in map(_points, self._blocks_back(stream, begin)) if points), None
        )
        if newest is not None:
            points = (point for lines in self._lines_from(stream, begin) for point in _points(lines))
            yield from self._events(points, newest, changed)

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


def _points(content: bytes) -> List[_Point]:
    return [
        _Point(int(step), int(steps), _seconds(clock), _numbers(_METRIC.findall(rest)))
        for step, steps, clock, rest in _LINE.findall(content)
    ]


def _numbers(pairs: Iterable[Tuple[bytes, bytes]]) -> Dict[str, float]:
    numbers = {}
    for name, value in pairs:
        try:
            numbers[name.decode()] = float(value)
        except ValueError:
            continue
    return numbers


def _seconds(clock: bytes) -> int:
    seconds = 0
    for part in clock.split(b":"):
        seconds = 60 * seconds + int(part)
    return seconds


# --- Megatron-LM

_TIME = rb"(?P<date>\d{4}-\d\d-\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?P<fraction>\.\d{1,6})?)"
_TIME_BEFORE = re.compile(rb"\[" + _TIME + rb"\] *\Z")
_LONGEST_TIME = 32
_STEP = re.compile(rb"iteration +(\d{1,15})/ *(\d{1,15}) \|([^\r\n]*)")
_VALIDATION = re.compile(rb"validation loss at iteration +(\d{1,15})(?: on validation set)? \|([^\r\n]*)")
_LOADED = re.compile(rb"load(?:ed|ing) [^\r\n]{0,40}checkpoint from [^\r\n]{1,1024} at iteration +(\d{1,15})")
_SAVED = re.compile(rb"successfully saved checkpoint (?:from|at) iteration +(\d{1,15}) to ")
_MOMENT = re.compile(
    rb"\[(before the start of training step|after training is done|exiting program [^\]\r\n]{0,80})\]"
    rb" datetime: " + _TIME
)
# A value torn by another rank's message is not followed by a blank and a bar.
_FIELD = re.compile(rb" ([A-Za-z][^:|]{0,60}): +([^ |/]+)(?:/[^ |]+)?(?= \|)")  # AMD's fork adds means
_VALUE = re.compile(rb" ([A-Za-z][^:|]{0,60}) value: +([^ |]+)(?= \|)")
# The loss of language models, and of others; a line has further ones, such as that of a router.
_LOSSES = ("lm loss", "loss", "total loss")
_SIGNAL = re.compile(rb"SIG[A-Z0-9]+")
_MILLISECONDS = "elapsed time per iteration (ms)"
# A node's clock may be before that of the file system.
_CLOCK_SKEW = 60.0


class MegatronReader(ProgressReader):
    """A reader of the lines of Megatron-LM, Megatron-Bridge and their forks.

    Times are those of the lines. Releases before core_v0.6 print none: theirs are counted back from the log's
    last change, by the elapsed times of the steps.
    """

    step_words = _MILLISECONDS.encode()
    validation_words = b"validation loss at iteration "

    def __init__(self, path: AnyPath, sizes: TrainingSizes = UNKNOWN_SIZES) -> None:
        super().__init__(path, sizes)
        self._now = -math.inf  # the time of the last step's line
        self._is_utc: Optional[bool] = None
        # The last step of the present attempt; None before its first one, and after its end.
        self._step: Optional[int] = None
        self._max_steps = 0
        # The time at which the next attempt began, and the iteration that it loaded; 0 where it loaded none.
        self._began: Optional[float] = None
        self._loaded: Optional[int] = None
        self._is_whole = False  # the log was read from its first byte on

    def _read(self, stream: BinaryIO, begin: int, changed: float) -> Iterator[Event]:
        if begin == 0:
            self._is_whole, self._loaded = True, 0
        if not self._has_times(stream, begin, changed):
            probe = copy.copy(self)
            probe._now = 0.0
            for lines in self._lines_from(stream, begin):
                list(probe._parse(lines))
            self._now = max(self._now, changed - probe._now)
        for lines in self._lines_from(stream, begin):
            yield from self._parse(lines)

    def _has_times(self, stream: BinaryIO, begin: int, changed: float) -> bool:
        """Return False if the newest step has no time; find out the time zone of those that have one."""
        for block in self._blocks_back(stream, begin):
            steps = [_find_time(step) for step in _STEP.finditer(block)]
            times = [time for time in (*steps, *_MOMENT.finditer(block)) if time]
            if self._is_utc is None and times:
                newest, latest = max(times, key=_position), changed + _CLOCK_SKEW
                local, utc = (_unix_time(newest, is_utc) for is_utc in (False, True))
                # A container may be in UTC: the last time that is not after the change is right.
                self._is_utc = local > latest or local < utc <= latest
            if steps:
                return steps[-1] is not None
        return True

    def _parse(self, lines: bytes) -> Iterator[Event]:
        # Each pattern begins with letters, which are searched for much faster than one of several patterns.
        patterns = (_STEP, _VALIDATION, _LOADED, _SAVED, _MOMENT)
        for match in sorted((match for each in patterns for match in each.finditer(lines)), key=_position):
            if match.re is _STEP:
                yield from self._take_step(match)
            elif match.re is _VALIDATION:
                loss = _loss(_numbers(_VALUE.findall(match.group(2))))
                if loss is not None:
                    yield Validation(self._now, int(match.group(1)), loss)
            elif match.re is _LOADED:
                self._loaded = int(match.group(1))
            elif match.re is _MOMENT:
                yield from self._take_moment(match)
            elif self._step is not None:  # the last step may have no line
                self._step = max(self._step, int(match.group(1)))

    def _take_step(self, match: Match[bytes]) -> Iterator[Event]:
        fields = _numbers(_FIELD.findall(match.group(3)))
        if _MILLISECONDS not in fields and "consumed samples" not in fields:
            return  # of another program
        step, before = int(match.group(1)), self._step
        seconds = (read_int(1000 * fields.get(_MILLISECONDS, 0.0), 0) or 0) / 1e6
        is_first = before is None or step <= before
        self._advance(seconds * (1 if before is None or step <= before else step - before), match)
        if self._now == -math.inf:
            return  # a torn line, before any that has a time
        self._step, self._max_steps = step, int(match.group(2))
        batch = read_int(fields.get("global batch size"), 1)
        tokens = batch * self._sizes.tokens if batch and self._sizes.tokens else None
        if is_first:
            yield self._start(step, seconds, tokens)
        speed = tokens / seconds if tokens and seconds else None
        rate, norm = fields.get("learning rate"), fields.get("grad norm")
        yield Train(self._now, step, _loss(fields), rate, norm, speed, tokens)

    def _advance(self, seconds: float, match: Match[bytes]) -> None:
        """Take the time of a step's line; one in whole seconds gets the steps' fraction."""
        self._now += seconds
        time = _find_time(match)
        if time:
            at = _unix_time(time, self._is_utc)
            self._now = min(max(self._now, at), at if time.group("fraction") else at + 1)

    def _start(self, step: int, seconds: float, tokens: Optional[int]) -> Start:
        """Return the start of the attempt whose first line is that of `step`."""
        after = step - 1 if self._loaded is None or self._loaded >= step else self._loaded
        began = self._now - seconds * (step - after) if self._began is None else min(self._began, self._now)
        self._began, self._loaded = None, 0 if self._is_whole else None
        return Start(began, after, self._max_steps, tokens_per_step=tokens)

    def _take_moment(self, match: Match[bytes]) -> Iterator[Event]:
        """Take in that a training begins, is done or leaves early."""
        at, words = _unix_time(match, self._is_utc), match.group(1)
        if words.startswith(b"before"):
            self._began, self._step = at, None
            return
        is_done = words.startswith(b"after")
        if self._step is not None:
            reason = "max_steps" if is_done else _reason(words)
            yield End(at, max(self._step, self._max_steps) if is_done else self._step, reason)
        elif is_done and self._began is not None and self._loaded:
            yield Start(self._began, self._loaded)
            yield End(at, self._loaded, "already_complete")
        self._step = self._began = None


def _position(match: Match[bytes]) -> int:
    return match.start()


def _find_time(step: Match[bytes]) -> Optional[Match[bytes]]:
    """Return the time before a step, ``[2025-11-27 10:00:00] iteration``."""
    return _TIME_BEFORE.search(step.string, max(step.start() - _LONGEST_TIME, 0), step.start())


def _unix_time(match: Match[bytes], is_utc: Optional[bool]) -> float:
    date, hour, minute, second = match.group("date", "hour", "minute", "second")
    return _minute(date, hour, minute, is_utc) + float(second)


@lru_cache(maxsize=64)
def _minute(date: bytes, hour: bytes, minute: bytes, is_utc: Optional[bool]) -> float:
    year, month, day = map(int, date.split(b"-"))
    parts = (year, month, day, int(hour), int(minute), 0, 0, 0, -1)
    try:
        return float(calendar.timegm(parts) if is_utc else time.mktime(parts))
    except (ValueError, OverflowError):  # a date that no calendar has
        return 0.0


def _loss(fields: Mapping[str, float]) -> Optional[float]:
    """Return the loss of a step; one that is not a number is left out of its line."""
    loss = next((fields[name] for name in _LOSSES if name in fields), None)
    if loss is None:
        is_nan = math.isnan(fields.get("grad norm", 0.0)) or fields.get("number of nan iterations", 0) > 0
        return math.nan if is_nan else None
    return None if loss == 0 and fields.get("number of skipped iterations", 0) > 0 else loss


def _reason(words: bytes) -> str:
    """Return why a training left early, in the words of our trainer."""
    signal = _SIGNAL.search(words)
    if signal:
        return signal.group().decode()
    return "max_time" if b"minutes" in words else "stop_after"


# The readers of the engines that write their events to the job's log.
READERS: Mapping[str, Type[ProgressReader]] = {"nemo": NemoReader, "megatron_lm": MegatronReader}
