"""The alerts of a run, ``alerts.jsonl`` in its directory: append-only, and the outbox of their messages.

A line is one message::

    {"alert": "loss_spike-3", "event": "opened", "number": 1, "time": 1764257263.5, "detector": "loss_spike",
     "why": "the loss is 9.1, its median 3.2", "launch": 2, "link": 3, "job": "17", "step": 1200,
     "since": 1764257201.0, "values": [3.2, 3.1, 9.1]}

A detector has one open alert at most: it is opened once, repeated ever less often, and resolved. A run's job
and any number of login nodes may watch at once: a message belongs to whoever first writes the file of its
name into `OUTBOX`, ``loss_spike-3.1.json``, which has the line that is then appended.
"""

import json
import os
import re
import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from slipway.common.backoff import double_wait
from slipway.common.files import (
    AnyPath,
    append_line,
    open_regular,
    read_int,
    read_text,
    to_printable,
    unix_time,
    write_once,
)
from slipway.watch.detectors import BLIND, FIRING, QUIET, Reading

ALERTS = "alerts.jsonl"
OUTBOX = "alerts"
OPENED, REPEATED, RESOLVED = "opened", "repeated", "resolved"

_EVENTS = (OPENED, REPEATED, RESOLVED)
_DETECTOR = r"[a-z][a-z_]{0,40}"
_ALERT = _DETECTOR + r"-[1-9][0-9]{0,5}"
_LONGEST_LINE = 1 << 14
# Of the file's end: ten thousand messages.
_MOST_BYTES = 1 << 22
_MOST_VALUES = 60
_LONGEST_WHY = 400
# Seconds after the opening until it is repeated, which double, and at most.
_REPEAT_SECONDS, _LONGEST_REPEAT = 3600.0, 86400.0
# Of a launch: a detector that is wrong again and again must not stop it for ever.
MOST_REACTIONS = 3
# After that long the writer of a message's file is taken for dead, and its line is appended by another.
_APPEND_SECONDS = 60.0


class Origin(NamedTuple):
    """The launch, the link and the job that an alert is about."""

    launch: Optional[int] = None
    link: Optional[int] = None
    job: Optional[str] = None


class Message(NamedTuple):
    """A line of `ALERTS`: one thing to tell people.

    Attributes
    ----------
    alert
        Name of the alert: the detector's name, and the how manieth alert of it this is.
    event, number
        `OPENED`, `REPEATED` or `RESOLVED`; and the how manieth message of the alert this is, from 1 on.
    time
        Unix time of the message.
    reaction
        What the job did about it besides telling people, when the alert was opened.
    """

    alert: str
    event: str
    number: int
    time: float
    detector: str
    why: str
    step: Optional[int] = None
    since: Optional[float] = None
    values: Tuple[float, ...] = ()
    origin: Origin = Origin()
    reaction: Optional[str] = None

    @property
    def name(self) -> str:
        """A name that no other message of the run has, fit for a file."""
        return f"{self.alert}.{self.number}"

    def to_json(self) -> Dict[str, Any]:
        fields = dict(self._asdict(), values=list(self.values))
        fields.update(fields.pop("origin")._asdict())
        return fields


class Alert(NamedTuple):
    """An alert: its first message and its newest."""

    first: Message
    newest: Message

    @property
    def is_open(self) -> bool:
        return self.newest.event != RESOLVED

    def to_json(self) -> Dict[str, Any]:
        """Return it for programs, as lists of runs have it."""
        newest = self.newest
        return {
            "alert": newest.alert,
            "open": self.is_open,
            "why": self.first.why,
            "step": self.first.step,
            "since": self.first.since or self.first.time,
            "until": None if self.is_open else newest.time,
            "ended_because": None if self.is_open else newest.why,
            "reaction": self.first.reaction,
        }


def read_messages(run_dir: AnyPath) -> List[Message]:
    """Return the messages of a run, oldest first; lines that are none are passed over."""
    try:
        with open_regular(os.path.join(run_dir, ALERTS)) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(size - _MOST_BYTES, 0))
            lines = stream.read(_MOST_BYTES).split(b"\n")
    except OSError:
        return []
    messages = (_parse(line) for line in lines if len(line) <= _LONGEST_LINE)
    return [message for message in messages if message]


def group_by_alert(messages: Iterable[Message]) -> List[Alert]:
    """Return the alerts of messages, in the order in which they were opened."""
    alerts: Dict[str, Alert] = {}
    for message in messages:
        first = alerts[message.alert].first if message.alert in alerts else message
        alerts[message.alert] = Alert(first, message)
    return list(alerts.values())


def read_alerts(run_dir: AnyPath) -> List[Alert]:
    """Return the alerts of a run."""
    return group_by_alert(read_messages(run_dir))


def open_alerts(run_dir: AnyPath) -> List[Alert]:
    """Return the alerts of a run that are not over."""
    return [alert for alert in read_alerts(run_dir) if alert.is_open]


def judge(
    alerts: Sequence[Alert],
    readings: Iterable[Reading],
    now: float,
    origin: Origin,
    reactions: Mapping[str, str],
) -> List[Message]:
    """Return the messages that readings make necessary.

    A detector that is blind leaves its alert open.

    Parameters
    ----------
    reactions
        By the detectors' names what the job does when an alert is opened, up to `MOST_REACTIONS` times.
    """
    newest = {alert.first.detector: alert for alert in alerts}
    left = MOST_REACTIONS - sum(
        alert.first.reaction is not None and alert.first.origin.launch == origin.launch for alert in alerts
    )
    messages = []
    for reading in readings:
        alert = newest.get(reading.detector)
        if reading.state == FIRING and not (alert and alert.is_open):
            count = int(alert.first.alert.rpartition("-")[2]) if alert else 0
            name = f"{reading.detector}-{count + 1}"
            reaction = reactions.get(reading.detector) if left > 0 else None
            left -= reaction is not None
            messages.append(_message(name, OPENED, 1, now, reading, origin)._replace(reaction=reaction))
        elif alert and alert.is_open and reading.state != BLIND:
            number = alert.newest.number
            wait = double_wait(number - 1, _REPEAT_SECONDS, _LONGEST_REPEAT)
            event = RESOLVED if reading.state == QUIET else REPEATED
            if event == RESOLVED or now - alert.newest.time >= wait:
                since = alert.first.since if reading.since is None else reading.since
                told = reading._replace(since=since, why=reading.why or alert.newest.why)
                messages.append(_message(alert.first.alert, event, number + 1, now, told, origin))
    return messages


def record(
    run_dir: AnyPath,
    readings: Sequence[Reading],
    origin: Origin,
    reactions: Mapping[str, str],
    now: Optional[float] = None,
) -> List[Message]:
    """Judge the readings of a run, and append the messages that nobody else has; return them.

    Raises
    ------
    OSError
        If they cannot be written.
    """
    now = time.time() if now is None else now
    alerts = read_alerts(run_dir)
    messages = judge(alerts, readings, now, origin, reactions)
    return [message for message in messages if _append(run_dir, message, now)]


def _append(run_dir: AnyPath, message: Message, now: float) -> bool:
    """Append a message unless another process does; return True if this one did."""
    os.makedirs(os.path.join(run_dir, OUTBOX), exist_ok=True)
    path = os.path.join(run_dir, OUTBOX, message.name + ".json")
    line = json.dumps(message.to_json())
    if not write_once(path, line + "\n"):
        try:
            if now - os.stat(path).st_mtime < _APPEND_SECONDS:
                return False
            line = read_text(path, _LONGEST_LINE).strip()
        except (OSError, ValueError):
            return False
        if not _parse(line.encode("utf-8")):
            return False
    append_line(os.path.join(run_dir, ALERTS), line)
    return True


def _message(alert: str, event: str, number: int, now: float, reading: Reading, origin: Origin) -> Message:
    why = to_printable(reading.why)[:_LONGEST_WHY]
    values = tuple(reading.values[-_MOST_VALUES:])
    return Message(
        alert, event, number, now, reading.detector, why, reading.step, reading.since, values, origin
    )


def _parse(line: bytes) -> Optional[Message]:
    """Return the message of a line that others may have written, ``None`` if it is none."""
    try:
        content = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    alert, event, detector, why = (str(content.get(name)) for name in ("alert", "event", "detector", "why"))
    number, moment = read_int(content.get("number"), 1), unix_time(content.get("time"))
    if not re.fullmatch(_ALERT, alert, re.ASCII) or alert.rpartition("-")[0] != detector:
        return None
    if event not in _EVENTS or number is None or moment is None:
        return None
    job = content.get("job")
    origin = Origin(
        read_int(content.get("launch"), 1),
        read_int(content.get("link"), 1),
        to_printable(job)[:_LONGEST_WHY] if isinstance(job, str) else None,
    )
    step, since = read_int(content.get("step"), 0), unix_time(content.get("since"))
    values = content.get("values")
    numbers = tuple(map(_number, values[-_MOST_VALUES:])) if isinstance(values, list) else ()
    why = to_printable(why)[:_LONGEST_WHY]
    reaction = content.get("reaction")
    reaction = reaction if isinstance(reaction, str) and re.fullmatch("[a-z]{1,20}", reaction) else None
    return Message(alert, event, number, moment, detector, why, step, since, numbers, origin, reaction)


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number else float("nan")
    except OverflowError:
        return float("inf")
