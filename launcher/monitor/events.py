"""The events that a trainer appends to ``metrics.jsonl``, and reading them while it still writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from launcher.runs.reading import LONGEST_LINE, open_regular, unix_time, whole


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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is known of the held-out tokens; the entropy of their unigrams in nats per token.

    With `has_sentinels` they are a T5's targets: a part of them marks spans and says nothing of the text.
    """

    tokens: int | None
    unigram_entropy: float
    has_sentinels: bool

    @property
    def name(self) -> str:
        """What the entropy is of."""
        return "held-out targets, sentinels included" if self.has_sentinels else "held-out tokens"


@dataclass(frozen=True, slots=True)
class Train:
    """A training step; times in seconds."""

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


def parse_event(line: str) -> Event | None:
    """Read one line; ``None`` for a kind that is not known here, and for what is no event at all."""
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
    keys = ("max_steps", *sizes, "parameters", "tokens_per_step")
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
    """Reads the events that were appended since it was last asked.

    The file need not exist yet, and its last line may be half written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return the new events, oldest first."""
        try:
            # Opened afresh each time: a network file system shows what others wrote only to a new open.
            with open_regular(self.path) as stream:
                stream.seek(self._offset)
                return self._read(stream)
        except FileNotFoundError:
            return []

    def _read(self, stream: BinaryIO) -> list[Event]:
        # Line by line: of a long training it is a hundred megabytes.
        found = []
        while line := stream.readline(LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break
            self._offset += len(line)
            found += parse_events(line)
        return found


def parse_events(content: bytes) -> list[Event]:
    """Read lines, passing over those that tell nothing that is known here."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    return [event for event in map(parse_event, lines) if event]
