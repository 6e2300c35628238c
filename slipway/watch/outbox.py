"""The delivery of a run's messages: each once on each route, whoever is first.

Jobs and login nodes deliver at the same time. A delivery is claimed by the file that only one of them can
make, ``alerts/loss_spike-3.1.webhook.1.json``, and its result is written over the claim. A claim without a
result is void after a while, and a failed delivery is tried again, ever less often, as attempt 2, 3, ...
"""

import json
import os
import re
import time
from functools import partial
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from slipway.common.backoff import double_wait
from slipway.common.files import (
    AnyPath,
    names_in,
    read_json,
    to_printable,
    unix_time,
    write_atomic,
    write_once,
)
from slipway.watch.alerts import OUTBOX, Message, read_messages
from slipway.watch.messages import Run
from slipway.watch.telling import Tell

CLAIMED, SENT, FAILED = "claimed", "sent", "failed"

# A process that claimed and left no word for so long is gone.
_CLAIM_SECONDS = 300.0
_RETRY_SECONDS, _LONGEST_RETRY = 30.0, 3600.0
# Older news are none.
_OLDEST_SECONDS = 7 * 86400.0
_CLAIM_BYTES = 1 << 12
_ATTEMPT = re.compile(r"(.+\.[0-9]+)\.([a-z]+)\.([0-9]{1,6})\.json")

Deliver = Callable[[Tell, str, Run, Message], None]


class NotDelivered(Exception):
    """A message did not arrive: why, without any secret."""


class Result(NamedTuple):
    """An attempt at a delivery: `CLAIMED`, `SENT` or `FAILED`, at a Unix time, why, and by whom."""

    attempt: int
    state: str
    time: float
    why: str = ""
    by: str = ""


def deliver_all(
    run: Run,
    tell: Tell,
    routes: Optional[Iterable[str]] = None,
    deliver: Optional[Deliver] = None,
    now: Callable[[], float] = time.time,
) -> List[Tuple[Message, str, Result]]:
    """Deliver what is in the outbox, oldest first; return the attempts of this call.

    Parameters
    ----------
    routes
        Names of the routes; by default those that a job can use.
    deliver
        Called with the settings, the name of a route, the run and a message; it raises `NotDelivered`.
    """
    deliver = deliver or _deliver
    routes = tell.routes() if routes is None else tuple(routes)
    messages = [message for message in read_messages(run.directory) if now() - message.time < _OLDEST_SECONDS]
    if not messages:
        return []
    last = find_last_attempts(run.directory)
    attempts = []
    for message in {message.name: message for message in messages}.values():
        for route in routes:
            before = last.get((message.name, route))
            if before is None or _is_due(before, run.host, now()):
                result = _attempt(
                    run, message, route, before.attempt + 1 if before else 1, partial(deliver, tell), now
                )
                if result:
                    attempts.append((message, route, result))
    return attempts


def find_last_attempts(run_dir: AnyPath) -> Dict[Tuple[str, str], Result]:
    """Return the newest attempt by the message's name and the route."""
    newest: Dict[Tuple[str, str], int] = {}
    for name in names_in(os.path.join(run_dir, OUTBOX)):
        match = _ATTEMPT.fullmatch(name)
        if match:
            key = (match[1], match[2])
            newest[key] = max(newest.get(key, 0), int(match[3]))
    return {key: _read(run_dir, key, attempt) for key, attempt in newest.items()}


def _attempt(
    run: Run,
    message: Message,
    route: str,
    attempt: int,
    deliver: Callable[[str, Run, Message], None],
    now: Callable[[], float],
) -> Optional[Result]:
    """Deliver a message if nobody else does: return the result, ``None`` if the claim is another's."""
    path = _path(run.directory, (message.name, route), attempt)
    claim = {"state": CLAIMED, "time": now(), "by": f"{run.host}:{os.getpid()}"}
    try:
        if not write_once(path, json.dumps(claim) + "\n"):
            return None
    except OSError:  # a full disk: whoever can write will deliver
        return None
    try:
        deliver(route, run, message)
        result = Result(attempt, SENT, now())
    except NotDelivered as error:
        result = Result(attempt, FAILED, now(), to_printable(str(error)))
    content = dict(claim, state=result.state, time=result.time, why=result.why)
    try:
        write_atomic(path, json.dumps(content) + "\n")
    except OSError as error:
        # The empty claim becomes void. It may then arrive twice, which is better than never.
        return result._replace(why=f"{result.why} (not recorded: {error.strerror})")
    return result


def _deliver(tell: Tell, route: str, run: Run, message: Message) -> None:
    from slipway.watch import routes  # late: it takes long, and mostly nothing is to be delivered

    routes.deliver(tell, route, run, message)


def _is_due(last: Result, host: str, now: float) -> bool:
    if last.state == SENT:
        return False
    if last.state == CLAIMED:
        return now - last.time >= _CLAIM_SECONDS or _is_gone(last.by, host)
    return now - last.time >= double_wait(last.attempt - 1, _RETRY_SECONDS, _LONGEST_RETRY)


def _is_gone(by: str, host: str) -> bool:
    """Return True if a claim is that of a process of this host that has ended."""
    where, _, process = by.rpartition(":")
    if where != host or not process.isdigit():
        return False
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as stream:
            return "State:\tZ" in stream.read()  # ended, and not reaped yet
    except OSError:
        return True


def _read(run_dir: AnyPath, key: Tuple[str, str], attempt: int) -> Result:
    path = _path(run_dir, key, attempt)
    try:
        content = read_json(path, _CLAIM_BYTES)
    except (OSError, ValueError):
        content = {}
    state = content.get("state")
    moment = unix_time(content.get("time"))
    if state not in (CLAIMED, SENT, FAILED) or moment is None:
        return Result(attempt, CLAIMED, _changed(path))
    why, by = (to_printable(str(content.get(name, ""))) for name in ("why", "by"))
    return Result(attempt, state, moment, why, by)


def _changed(path: AnyPath) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _path(run_dir: AnyPath, key: Tuple[str, str], attempt: int) -> str:
    message, route = key
    return os.path.join(run_dir, OUTBOX, f"{message}.{route}.{attempt}.json")
