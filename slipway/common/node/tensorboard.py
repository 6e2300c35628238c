"""The events of a training in TensorBoard's files, where its log has no lines of steps.

Each scalar is a record of its own: the time, the step, the tag and the value, always in this order, with the
same bytes between them. A search for these needs no parser of the format, and may begin anywhere in a file.
"""

import contextlib
import os
import re
import struct
from itertools import groupby
from typing import Dict, Iterator, List, Mapping, NamedTuple, Set

from slipway.common.files import AnyPath, names_in, open_regular, unix_time
from slipway.common.node.events import Event, Start, Train, Validation
from slipway.common.node.progress_lines import UNKNOWN_SIZES, TrainingSizes

_PREFIX = "events.out.tfevents."
_BLOCK_BYTES = 1 << 20
# Some hundred steps.
_TAIL_BYTES = 1 << 16
_LONGEST_RECORD = 1 << 8


class Tags(NamedTuple):
    """The tags of an engine's scalars; `first` is the step that it writes of the first one."""

    loss: str
    validation: str
    rate: str
    norm: str
    seconds: str
    first: int


# The tags of the engines that write such files. Lightning counts steps from 0.
TAGS: Mapping[str, Tags] = {
    "nemo": Tags("reduced_train_loss", "val_loss", "lr", "grad_norm", "train_step_timing in s", 0),
    "megatron_lm": Tags("lm loss", "lm loss validation", "learning-rate", "grad-norm", "iteration-time", 1),
}


class _Scalar(NamedTuple):
    time: float
    step: int
    tag: str
    value: float


class TensorboardReader:
    """A reader of the events appended to the files of a directory since the last call."""

    def __init__(self, directory: AnyPath, tags: Tags, sizes: TrainingSizes = UNKNOWN_SIZES) -> None:
        self._directory = directory
        self._tags = tags
        self._sizes = sizes
        self._offsets: Dict[str, int] = {}
        self._begun: Set[str] = set()  # the files of which a scalar was read
        self._pattern = re.compile(
            rb"\x09(.{8})(?:\x10([\x80-\xff]{0,7}[\x00-\x7f]))?\x2a[\x00-\x7f]\x0a[\x00-\x7f]\x0a[\x00-\x7f]("
            + "|".join(map(re.escape, tags[:5])).encode()
            + rb")\x15(.{4})",
            re.DOTALL,
        )

    def stream(self) -> Iterator[Event]:
        """Yield the new events, oldest first."""
        for name in self._names():
            yield from self._events(name, self._offsets.get(name, 0))

    def read_end(self) -> List[Event]:
        """Return the newest events from the end of the newest file with any."""
        for name in reversed(self._names()):
            begin = 0
            with contextlib.suppress(OSError):
                begin = max(os.path.getsize(os.path.join(self._directory, name)) - _TAIL_BYTES, 0)
            events = list(self._events(name, begin))
            if events:
                return events
        return []

    def _names(self) -> List[str]:
        # Each name has the second at which the file was made.
        return [name for name in names_in(self._directory) if name.startswith(_PREFIX)]

    def _scalars(self, name: str, begin: int) -> Iterator[_Scalar]:
        """Read the scalars of a file from a byte on."""
        with contextlib.suppress(OSError), open_regular(os.path.join(self._directory, name)) as stream:
            stream.seek(begin)
            content = b""
            while True:
                block = stream.read(_BLOCK_BYTES)
                content += block
                end = 0
                for match in self._pattern.finditer(content):
                    end = match.end()
                    time, value = struct.unpack("<df", match.group(1) + match.group(4))
                    if unix_time(time) is not None:
                        step = _varint(match.group(2) or b"") + 1 - self._tags.first
                        yield _Scalar(time, step, match.group(3).decode(), value)
                done = end if not block else max(end, len(content) - _LONGEST_RECORD)
                begin, content = begin + done, content[done:]
                self._offsets[name] = begin
                if not block:
                    return

    def _events(self, name: str, begin: int) -> Iterator[Event]:
        """Yield the events of a file, which a training began, from a byte on."""
        tags, tokens = self._tags, self._sizes.tokens_per_step
        for step, group in groupby(self._scalars(name, begin), key=lambda scalar: scalar.step):
            of_step = {scalar.tag: scalar for scalar in group}
            values = {tag: scalar.value for tag, scalar in of_step.items()}
            if name not in self._begun:
                self._begun.add(name)
                began = min(scalar.time for scalar in of_step.values())
                yield Start(began, step - 1, self._sizes.steps, tokens_per_step=tokens)
            if tags.loss in of_step:
                rate, norm, seconds = map(values.get, (tags.rate, tags.norm, tags.seconds))
                speed = tokens / seconds if tokens and seconds else None
                yield Train(of_step[tags.loss].time, step, values[tags.loss], rate, norm, speed, tokens)
            if tags.validation in of_step:
                yield Validation(of_step[tags.validation].time, step, values[tags.validation])


def _varint(content: bytes) -> int:
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(content))
