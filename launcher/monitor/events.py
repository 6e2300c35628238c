"""The events that a trainer appends to ``metrics.jsonl``, their readers, and the progress they add up to."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from supervisor.files import open_regular, unix_time, whole

# A longer line is read in pieces.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """A trainer began, at `step` (0, or where its checkpoint ended)."""

    time: float
    step: int
    max_steps: int | None
    tensor: int | None
    pipeline: int | None
    virtual: int | None
    context: int | None
    data: int | None
    parameters: int | None
    tokens_per_step: int | None
    consumed_samples: int | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out tokens: their number, and the entropy of their unigrams in nats per token.

    With `has_sentinels` they are a T5's targets, a part of which marks spans and is no text.
    """

    tokens: int | None
    unigram_entropy: float
    has_sentinels: bool

    @property
    def name(self) -> str:
        """The tokens that the entropy is of, in words."""
        return "held-out targets, sentinels included" if self.has_sentinels else "held-out tokens"


class Train(NamedTuple):
    """A training step; times in seconds. A tuple, because there are millions of them."""

    time: float
    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Validation:
    """The loss on held-out tokens after `step` steps."""

    time: float
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class End:
    """The trainer ended by itself."""

    time: float
    step: int
    reason: str


Event = Start | HeldOut | Train | Validation | End


# The line of a step as the trainer writes it, parsed faster than as JSON. No other line matches, not even one
# with a key twice.
_NUMBER = rb"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+"
_REAL = rb"(" + _NUMBER + rb"|NaN|-?+Infinity)"
_WHOLE = rb"(0|[1-9][0-9]{0,17}+)"
_OTHERS = (
    rb'(?:, "(?!(?:kind|time|step|loss|lr|grad_norm|tokens|tokens_per_second)")\w++": (?:'
    + _NUMBER
    + rb"|NaN|-?+Infinity|null))*+"
)
_STEP = re.compile(
    rb'\{"kind": "train", "time": (' + _NUMBER + rb'), "step": ' + _WHOLE + rb', "loss": ' + _REAL
    + rb', "lr": ' + _REAL + rb', "grad_norm": ' + _REAL + _OTHERS + rb', "tokens": ' + _WHOLE + _OTHERS
    + rb', "tokens_per_second": ' + _REAL + _OTHERS + rb"\}\n?+"
)  # fmt: skip
_STEP_BEGINS = b'{"kind": "train", '
_EVENT_BEGINS = b'{"kind"'


def parse_step(line: bytes) -> Train | None:
    """Parse the line of a step in the trainer's own format; return ``None`` for any other line."""
    match = _STEP.fullmatch(line)
    if match is None:
        return None
    seconds, step, loss, rate, norm, tokens, speed = match.groups()
    time = unix_time(float(seconds))
    if time is None:
        return None
    return Train(time, int(step), float(loss), float(rate), float(norm), float(speed), int(tokens))


def parse_event(line: str) -> Event | None:
    """Parse one line; return ``None`` for an unknown kind of event, and for a line that is no event."""
    content = _json_object(line)
    try:
        return _event(content) if content else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _event(content: Mapping[str, Any]) -> Event | None:
    kind = content.get("kind")
    if kind == "data":
        is_held_out = content.get("split") == "validation" and content.get("unigram_entropy") is not None
        return _held_out(content) if is_held_out else None
    if kind not in ("start", "train", "validation", "end"):
        return None
    time, step = unix_time(content["time"]), whole(content["step"], 0)
    if time is None or step is None:
        return None
    if kind == "train":
        loss, rate, norm, speed = (
            _real(content, key) for key in ("loss", "lr", "grad_norm", "tokens_per_second")
        )
        return Train(time, step, loss, rate, norm, speed, _whole(content, "tokens"))
    if kind == "validation":
        return Validation(time, step, float(content["val_loss"]))
    if kind == "end":
        return End(time, step, str(content.get("reason")))
    sizes = ("tensor", "pipeline", "virtual", "context", "data")
    keys = ("max_steps", *sizes, "parameters", "tokens_per_step", "consumed_samples")
    return Start(time, step, *(_whole(content, key) for key in keys))


def _held_out(content: Mapping[str, Any]) -> HeldOut:
    entropy = float(content["unigram_entropy"])
    return HeldOut(_whole(content, "tokens"), entropy, bool(content.get("has_sentinels", False)))


def _json_object(line: str) -> Mapping[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        # A trainer that was killed while writing leaves half a line; the next one appends to it.
        rest = line.rfind('{"kind"')
        return _json_object(line[rest:]) if rest > 0 else None
    return content if isinstance(content, dict) else None


def _real(content: Mapping[str, Any], key: str) -> float | None:
    value = content.get(key)
    return None if value is None else float(value)


def _whole(content: Mapping[str, Any], key: str) -> int | None:
    return whole(content.get(key), 0)


class EventReader:
    """A reader of the events appended since the last call.

    The file need not exist yet, and its last line may be incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._is_in_long_line = False

    def poll(self) -> list[Event]:
        """Return the new events, oldest first."""
        return list(self.stream())

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first; those of a long training may not fit into memory."""
        for line in self._lines():
            step = parse_step(line)
            if step is not None:
                yield step
            else:
                yield from parse_events(line)

    def newest(self, steps: int) -> list[Event]:
        """Return the new events, with the first step after each start and the last `steps` steps only."""
        return newest(_read_late(self._lines()), steps)

    def _lines(self) -> Iterator[bytes]:
        try:
            # Opened afresh each time: a network file system shows what others wrote only to a new open.
            with open_regular(self.path) as stream:
                stream.seek(self._offset)
                yield from self._whole_lines(stream)
        except FileNotFoundError:
            return

    def _whole_lines(self, stream: BinaryIO) -> Iterator[bytes]:
        for line in iter(partial(stream.readline, LONGEST_LINE), b""):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < LONGEST_LINE and not self._is_in_long_line:
                return
            self._offset += len(line)
            if is_whole and not self._is_in_long_line:
                yield line
            self._is_in_long_line = not is_whole


def newest(items: Iterable[Event | bytes | None], steps: int) -> list[Event]:
    """Select the events that show the progress of a training: all but most of the steps.

    The selected steps are the first one after each start, and the last `steps`.

    Parameters
    ----------
    items
        Events, or lines of steps, which are parsed only if selected; ``None`` is skipped.
    """
    kept: list[tuple[int, Event]] = []
    last: deque[tuple[int, Event | bytes]] = deque(maxlen=steps)
    is_first = True
    for index, item in enumerate(items):
        if is_first and isinstance(item, bytes):
            item = parse_step(item) or next(iter(parse_events(item)), None)
        if isinstance(item, bytes) or (isinstance(item, Train) and not is_first):
            last.append((index, item))
        elif item is not None:
            kept.append((index, item))
            is_first = isinstance(item, Start) or (is_first and not isinstance(item, Train))
    for index, item in last:
        events = [item] if not isinstance(item, bytes) else parse_events(item)
        kept += [(index, event) for event in events]
    return [event for _, event in sorted(kept, key=lambda numbered: numbered[0])]


def _read_late(lines: Iterable[bytes]) -> Iterator[Event | bytes]:
    """Yield the lines of steps unparsed; a torn line may have another event at its end."""
    for line in lines:
        if line.startswith(_STEP_BEGINS) and line.find(_EVENT_BEGINS, 1) < 0:
            yield line
        else:
            yield from parse_events(line)


def parse_events(content: bytes) -> list[Event]:
    """Parse lines, skipping those that are no known event."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    return [event for event in map(parse_event, lines) if event]


# Enough for a trainer's start and its first step, and for the newest thirty steps.
_HEAD_BYTES = 1 << 11
_TAIL_BYTES = 1 << 13
# The last validation is searched for in this many bytes before the end, a few thousand steps.
_SEARCH_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 15  # of the first block; each further one is four times as large
_VALIDATION = b'"val_loss"'
_LONGEST_LINE = 1 << 12


def read_head_and_tail(
    path: Path, *, restarted: bool = False, head: int = _HEAD_BYTES, tail: int = _TAIL_BYTES
) -> list[Event]:
    """Read the start, the first step, the newest steps and the last validation from the ends of a file.

    These are the events that `launcher.monitor.events.Progress` needs now; five hundred runs take half a
    second.

    Parameters
    ----------
    restarted
        True if the trainer started more than once in this file; the rate is then not counted from its first
        step.
    """
    try:
        with open_regular(path, buffering=0) as raw:
            return _head_and_tail(raw, restarted, head, tail)
    except FileNotFoundError:
        return []


def _head_and_tail(stream: BinaryIO, restarted: bool, head: int, tail: int) -> list[Event]:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= head + tail:
        return parse_events(stream.read().rpartition(b"\n")[0])
    begin = _first(parse_events(stream.read(head).rpartition(b"\n")[0]), restarted)
    stream.seek(size - tail)
    content = stream.read()
    skipped = content.find(b"\n") + 1  # the end of a line that began before
    newest = parse_events(content[skipped:].rpartition(b"\n")[0])
    if not any(isinstance(event, Validation) for event in newest):
        begin += last_line_with(stream, _VALIDATION, size - tail + skipped)
    return begin + newest


def _first(events: list[Event], restarted: bool) -> list[Event]:
    """Return the events up to the first step, with that step unless the trainer restarted."""
    steps = [index for index, event in enumerate(events) if isinstance(event, Train)]
    return events[: steps[0] + (not restarted)] if steps else events


def last_line_with(stream: BinaryIO, words: bytes, before: int) -> list[Event]:
    """Return the event of the last line with `words` before a byte; empty if there is none near."""
    end, size, least = before, _BLOCK_BYTES, max(before - _SEARCH_BYTES, 0)
    while end > least:
        start = max(end - size, least)
        stream.seek(start)
        at = stream.read(end - start).rfind(words)
        if at >= 0:
            return _line_around(stream, start + at)
        if start == least:
            break
        end, size = start + len(words) - 1, size * 4  # the words may lie across the blocks
    return []


def _line_around(stream: BinaryIO, at: int) -> list[Event]:
    start = max(at - _LONGEST_LINE, 0)
    stream.seek(start)
    content = stream.read(2 * _LONGEST_LINE)
    begin = content.rfind(b"\n", 0, at - start) + 1
    return parse_events(content[begin:].partition(b"\n")[0])


# --- progress

# The steps over which the throughput is taken: the first step of a training is slow, and single ones jitter.
_WINDOW = 20


class Progress:
    """The newest event of each kind from a trainer.

    Attributes
    ----------
    step
        Steps completed, or the step that the trainer started from; ``None`` before it started.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.step: int | None = None
        self.start: Start | None = None
        self.train: Train | None = None
        self.validation: Validation | None = None
        self.held_out: HeldOut | None = None
        self.end: End | None = None
        self._first: Train | None = None
        self._speeds: deque[float] = deque(maxlen=_WINDOW)
        self.apply(events)

    def apply(self, events: Iterable[Event]) -> None:
        """Take in further events."""
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take in one further event."""
        match event:
            case Train():
                self._advance(event)
            case Start():
                self._begin(event)
            case Validation():
                self.validation = event
            case HeldOut():
                self.held_out = event
            case End():
                self.end = event

    def _begin(self, start: Start) -> None:
        # A requeued job starts again in the same file: its rate is counted anew, from its checkpoint's step.
        self.start, self.step = start, start.step
        self.train = self.end = self._first = None
        self._speeds.clear()

    def _advance(self, train: Train) -> None:
        self.train, self.step = train, train.step
        self._first = self._first or train
        if train.tokens_per_second is not None:
            self._speeds.append(train.tokens_per_second)

    @property
    def max_steps(self) -> int | None:
        return self.start.max_steps if self.start else None

    @property
    def loss(self) -> float | None:
        return self.train.loss if self.train else None

    @property
    def validation_loss(self) -> float | None:
        return self.validation.loss if self.validation else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the last steps."""
        return sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None

    @property
    def steps_per_second(self) -> float | None:
        """The rate since the trainer last started, without its first step, which includes the warm-up."""
        if not (self.train and self._first):
            return None
        steps, seconds = self.train.step - self._first.step, self.train.time - self._first.time
        return steps / seconds if steps > 0 and seconds > 0 else None

    @property
    def eta(self) -> float | None:
        """Seconds that the remaining steps will take; never negative, ``None`` if unknown."""
        if self.step is None or self.max_steps is None:
            return None
        remaining = max(self.max_steps - self.step, 0)
        if remaining == 0:
            return 0.0
        return remaining / self.steps_per_second if self.steps_per_second else None
