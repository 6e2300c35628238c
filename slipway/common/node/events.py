"""The events of a training, and the readers of ``metrics.jsonl``, to which our trainer appends them."""

import contextlib
import json
import os
from collections import deque
from functools import partial
from typing import (
    Any,
    BinaryIO,
    Callable,
    Deque,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)

from slipway.common.files import AnyPath, blocks_back, open_regular, read_int, unix_time

# A longer line is read in pieces.
LONGEST_LINE = 1 << 20


class Start(NamedTuple):
    """A trainer began, at `step` (0, or where its checkpoint ended)."""

    time: float
    step: int
    max_steps: Optional[int] = None
    tensor: Optional[int] = None
    pipeline: Optional[int] = None
    virtual: Optional[int] = None
    context: Optional[int] = None
    data: Optional[int] = None
    parameters: Optional[int] = None
    tokens_per_step: Optional[int] = None
    consumed_samples: Optional[int] = None


class HeldOut(NamedTuple):
    """The held-out tokens: their number, and the entropy of their unigrams in nats per token.

    With `has_sentinels` they are a T5's targets, where some tokens mark spans instead of text.
    """

    tokens: Optional[int]
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
    loss: Optional[float]
    learning_rate: Optional[float]
    grad_norm: Optional[float]
    tokens_per_second: Optional[float]
    tokens: Optional[int]


class Validation(NamedTuple):
    """The loss on held-out tokens after `step` steps."""

    time: float
    step: int
    loss: float


class End(NamedTuple):
    """The trainer ended by itself."""

    time: float
    step: int
    reason: str


Event = Union[Start, HeldOut, Train, Validation, End]
Loads = Callable[[str], Any]


def parse_event(line: str, loads: Loads = json.loads) -> Optional[Event]:
    """Parse one line; return ``None`` for an unknown kind of event, and for a line that is no event."""
    content = _json_object(line, loads)
    try:
        return _to_event(content) if content else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _to_event(content: Mapping[str, Any]) -> Optional[Event]:
    kind = content.get("kind")
    if kind == "data":
        entropy = content.get("unigram_entropy") if content.get("split") == "validation" else None
        tokens, has_sentinels = read_int(content.get("tokens"), 0), bool(content.get("has_sentinels", False))
        return None if entropy is None else HeldOut(tokens, float(entropy), has_sentinels)
    if kind not in ("start", "train", "validation", "end"):
        return None
    time, step = unix_time(content["time"]), read_int(content["step"], 0)
    if time is None or step is None:
        return None
    if kind == "train":
        values = (content.get(key) for key in ("loss", "lr", "grad_norm", "tokens_per_second"))
        loss, rate, norm, speed = (None if value is None else float(value) for value in values)
        return Train(time, step, loss, rate, norm, speed, read_int(content.get("tokens"), 0))
    if kind == "validation":
        return Validation(time, step, float(content["val_loss"]))
    if kind == "end":
        return End(time, step, str(content.get("reason")))
    return Start(time, step, *(read_int(content.get(name), 0) for name in Start._fields[2:]))


def _json_object(line: str, loads: Loads) -> Optional[Mapping[str, Any]]:
    with contextlib.suppress(ValueError, RecursionError):  # NaN, which Python's json alone reads; half a line
        content = loads(line)
        return content if isinstance(content, dict) else None
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        # A trainer that was killed while writing leaves half a line; the next one appends to it.
        rest = line.rfind('{"kind"')
        return _json_object(line[rest:], json.loads) if rest > 0 else None
    return content if isinstance(content, dict) else None


class EventReader:
    """A reader of the events appended since the last call, up to `offset`; the file need not exist yet."""

    def __init__(self, path: AnyPath, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._is_in_long_line = False

    def stream(self, loads: Loads = json.loads) -> Iterator[Event]:
        """Yield the new events, oldest first; those of a long training may not fit into memory."""
        for line in self._lines():
            yield from parse_events(line, loads)

    def newest(self, steps: int) -> List[Event]:
        """Return the new events, with the first step after each start and the last `steps` steps only."""
        return select_newest(_read_late(self._lines()), steps)

    def _lines(self) -> Iterator[bytes]:
        # Opened afresh each time: a network file system shows what others wrote only to a new open.
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as stream:
            stream.seek(self.offset)
            for line in iter(partial(stream.readline, LONGEST_LINE), b""):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < LONGEST_LINE and not self._is_in_long_line:
                    return
                self.offset += len(line)
                if is_whole and not self._is_in_long_line:
                    yield line
                self._is_in_long_line = not is_whole


def select_newest(items: Iterable[Union[Event, bytes]], steps: int) -> List[Event]:
    """Select the events that show the progress: of the steps the first after each start and the last ones.

    `items` are events, or lines of steps, which are parsed only if selected.
    """
    kept: List[Tuple[int, Union[Event, bytes]]] = []
    last: Deque[Tuple[int, Union[Event, bytes]]] = deque(maxlen=steps)
    is_first = True
    for index, item in enumerate(items):
        if is_first and isinstance(item, bytes):  # it may be torn, and no step
            kept += [(index, event) for event in parse_events(item)]
            is_first = not isinstance(kept[-1][1] if kept else None, Train)
        elif isinstance(item, bytes) or (isinstance(item, Train) and not is_first):
            last.append((index, item))
        else:
            kept.append((index, item))
            is_first = isinstance(item, Start) or (is_first and not isinstance(item, Train))
    selected = (item for _, item in sorted([*kept, *last], key=lambda numbered: numbered[0]))
    events = (parse_events(item) if isinstance(item, bytes) else [item] for item in selected)
    return [event for some in events for event in some]


def _read_late(lines: Iterable[bytes]) -> Iterator[Union[Event, bytes]]:
    """Yield the lines of steps unparsed, which most are; a torn one may have another event at its end."""
    for line in lines:
        is_step = line.startswith(b'{"kind": "train", ') and line.find(b'{"kind"', 1) < 0
        yield from [line] if is_step else parse_events(line)


def parse_events(content: bytes, loads: Loads = json.loads) -> List[Event]:
    """Parse lines, skipping those that are no known event."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    events = (parse_event(line, loads) for line in lines)
    return [event for event in events if event]


# Enough for a trainer's start and its first step, and for the newest thirty steps.
_HEAD_BYTES = 1 << 11
_TAIL_BYTES = 1 << 13
# The last validation is searched for in this many bytes before the end, a few thousand steps.
_SEARCH_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 15  # of the first block; each further one is four times as large
_VALIDATION = b'"val_loss"'
_LONGEST_LINE = 1 << 12


def read_head_and_tail(
    path: AnyPath, *, restarted: bool = False, head: int = _HEAD_BYTES, tail: int = _TAIL_BYTES
) -> List[Event]:
    """Read the start, the first step, the newest steps and the last validation from the ends of a file.

    These are the events that show the present progress; five hundred runs take half a second. If the trainer
    `restarted` in this file, the first step is left out, as the rate is not counted from it.
    """
    try:
        with open_regular(path, buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if size <= head + tail:
                return parse_events(stream.read().rpartition(b"\n")[0])
            first = parse_events(stream.read(head).rpartition(b"\n")[0])
            steps = [index for index, event in enumerate(first) if isinstance(event, Train)]
            if steps:
                first = first[: steps[0] + (not restarted)]
            stream.seek(size - tail)
            content = stream.read()
            skipped = content.find(b"\n") + 1  # the end of a line that began before
            newest = parse_events(content[skipped:].rpartition(b"\n")[0])
            if not any(isinstance(event, Validation) for event in newest):
                first += parse_events(find_last_line(stream, _VALIDATION, size - tail + skipped))
            return first + newest
    except FileNotFoundError:
        return []


def find_last_line(stream: BinaryIO, words: bytes, before: int) -> bytes:
    """Return the last line with `words` before a byte; empty if none is near."""
    least, overlap = max(before - _SEARCH_BYTES, 0), len(words) - 1
    for start, block in blocks_back(stream, least, before, _BLOCK_BYTES, growth=4, overlap=overlap):
        place = block.rfind(words)
        if place >= 0:
            at = start + place
            begin = max(at - _LONGEST_LINE, 0)
            stream.seek(begin)
            content = stream.read(2 * _LONGEST_LINE)
            line = content.rfind(b"\n", 0, at - begin) + 1
            return content[line:].partition(b"\n")[0]
    return b""
