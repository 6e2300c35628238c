"""A look at runs from the login node: what their jobs cannot see, or are not there to see."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import UserError, escape
from launcher.jobs.launches import Launch
from launcher.jobs.lookup import RunRef
from launcher.jobs.status import LaunchStatus, current_statuses
from launcher.monitor.progress import read_schedule
from launcher.monitor.readers import open_reader
from launcher.monitor.run_status import elapsed_seconds
from launcher.runs.trust import is_own, why_untrusted
from launcher.slurm.states import State
from slipway.common.errors import first_line
from slipway.common.extras import install_command
from slipway.common.files import read_json, read_text, unix_time, write_atomic
from slipway.common.node import checkpoints
from slipway.common.node import settings as job_settings
from slipway.common.node.marks import cancelled_by
from slipway.common.node.settings import Settings
from slipway.watch import parameters, telling
from slipway.watch.alerts import OUTBOX, Alert, Message, Origin, group_by_alert, judge, open_alerts, record
from slipway.watch.detectors import BLIND, QUIET, Reading, read_all
from slipway.watch.messages import Run, compose_subject, compose_text
from slipway.watch.outbox import NotDelivered, Result, deliver_all
from slipway.watch.telling import Tell
from slipway.watch.windows import Facts, JobState, Window, measure_disk

logger = logging.getLogger("launcher.monitor")

# As many steps are read of a run as its detectors remember.
_STEPS = 2000
# A job that has not looked for so long has nobody who looks.
_JOB_LOOKS_SECONDS = 120.0
_MEMORY = "login.json"
# A job that vanished longer ago is no news.
_DAYS = 3
# The one detector of this side while a job looks itself.
_OF_THE_JOB = "job"


@dataclass(frozen=True)
class Look:
    """The findings of one look at a run.

    `job_looks` is True while its job looks at itself; `problem` is why nothing could be recorded.
    """

    status: LaunchStatus
    readings: Sequence[Reading]
    messages: Sequence[Message]
    alerts: Sequence[Alert]
    job_looks: bool
    problem: str | None = None

    @property
    def blind(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.state == BLIND]

    def to_json(self) -> dict[str, Any]:
        """Return the look for programs."""
        return {
            "run": self.status.run,
            "run_dir": str(self.status.run_dir),
            "state": self.status.state.value,
            "watched_by_its_job": self.job_looks,
            "readings": [
                {**reading._asdict(), "values": list(map(str, reading.values))} for reading in self.readings
            ],
            "alerts": [alert.to_json() for alert in self.alerts],
            "new": [message.name for message in self.messages],
            "problem": self.problem,
        }


def look_at(refs: Sequence[RunRef]) -> list[Look]:
    """Look at the runs that have not ended, or not in order; each scheduler is asked once for all."""
    return [
        _look(status, status.launch)
        for status in current_statuses(refs)
        if status.launch is not None and _is_worth_a_look(status, status.launch)
    ]


def _is_worth_a_look(status: LaunchStatus, launch: Launch) -> bool:
    """Return True for a run that may live, or ended days ago at most with open alerts or without a mark."""
    if status.may_live:
        return True
    alerts = open_alerts(status.run_dir)
    created = datetime.fromisoformat(launch.manifest.created).timestamp()
    newest = max(created, status.ended or 0.0, *(alert.newest.time for alert in alerts))
    is_bad = status.state is State.UNKNOWN or (status.state.is_final and not status.state.is_good)
    is_gone = is_bad and launch.manifest.job_id is not None and not _has_end_mark(status, launch)
    return (bool(alerts) or is_gone) and time.time() - newest < _DAYS * 86400


def _look(status: LaunchStatus, launch: Launch) -> Look:
    now, run_dir = time.time(), status.run_dir
    settings = _read_settings(launch)
    job_looks = status.state is State.RUNNING and _job_looked(run_dir, now)
    origin = Origin(launch.paths.number, status.chain.current if status.chain else 1, status.job_id)
    readings: Sequence[Reading] = []
    told: list[Reading] = []
    messages: Sequence[Message] = []
    problem = None
    try:
        own = parameters.from_json(settings.watch if settings else {})
        window = Window(own, read_schedule(launch.paths.config))
        _recall(window, run_dir)
        if not job_looks and status.state is not State.PENDING:
            for event in open_reader(launch).newest(_STEPS):
                window.take(event)
        window.take_facts(_find_facts(status, launch, settings, now))
        readings = read_all(window, own)
        told = _choose_readings(status, launch, readings, job_looks=job_looks)
        if not is_own(run_dir):  # what lies there could lead the writing astray
            raise PermissionError(f"{run_dir} is another user's")
        messages = record(run_dir, told, origin, {}, now)
        _remember(window, run_dir)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        problem = first_line(error)
    alerts = open_alerts(run_dir)
    if problem:  # what is wrong is said all the same
        news = group_by_alert(judge(alerts, told, now, origin, {}))
        alerts += [alert for alert in news if alert.first.number == 1]
    return Look(status, readings, messages, alerts, job_looks, problem)


def _choose_readings(
    status: LaunchStatus, launch: Launch, readings: Sequence[Reading], *, job_looks: bool
) -> list[Reading]:
    """Return what is to be recorded: of a training that its job watches, or that has ended, the job alone."""
    if status.state in (State.COMPLETED, State.CANCELLED) and _has_end_mark(status, launch):
        why = f"the job is {status.state.value}"
        return [Reading(each.first.detector, QUIET, why) for each in open_alerts(status.run_dir)]
    if job_looks or not status.may_live:
        return [reading for reading in readings if reading.detector == _OF_THE_JOB]
    return list(readings)


def _find_facts(status: LaunchStatus, launch: Launch, settings: Settings | None, now: float) -> Facts:
    newest: int | str = "the run's checkpoints are not known"
    if settings and settings.checkpoints:
        progress = checkpoints.progress(settings.checkpoints, settings.engine)
        newest = progress.step if progress else 0
    job: JobState | str = status.unanswered or "the run has no job yet"
    if status.unanswered is None and launch.manifest.job_id is not None:
        is_bad = status.state.is_final and not status.state.is_good
        word = None if status.state is State.UNKNOWN else "FAILED" if is_bad else status.state.value
        elapsed = elapsed_seconds(status) if status.state is State.RUNNING else None
        began = None if elapsed is None else now - elapsed
        job = JobState(word, _has_end_mark(status, launch), began)
    return Facts(now, newest, measure_disk(str(status.run_dir)), job=job)


def _has_end_mark(status: LaunchStatus, launch: Launch) -> bool:
    """Return True if the end of the job is on record: by its supervisor, or by whoever cancelled it."""
    job_id = (status.job_id or "").partition("_")[0]
    own = [attempt for attempt in launch.attempts if attempt.job_id.partition("_")[0] == job_id]
    if status.state is State.CANCELLED and not own and launch.attempts:
        # A chain that gives up cancels its next job: the word is that of the last one that began.
        return launch.attempts[-1].is_over or cancelled_by(launch.paths.directory, job_id) is not None
    return status.state is State.CANCELLED or any(attempt.is_over for attempt in own)


def _recall(window: Window, run_dir: Path) -> None:
    """Give a window what the look before remembered of facts."""
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        content = read_json(run_dir / OUTBOX / _MEMORY)
        for name, own in (("conditions", window.conditions), ("since", window.since)):
            own.update({str(word): float(moment) for word, moment in content[name].items()})
        window.disk.extend((float(moment), int(free)) for moment, free in content["disk"])


def _remember(window: Window, run_dir: Path) -> None:
    content = {"conditions": window.conditions, "since": window.since, "disk": list(window.disk)}
    (run_dir / OUTBOX).mkdir(exist_ok=True)
    write_atomic(run_dir / OUTBOX / _MEMORY, json.dumps(content) + "\n", sync=False)


def deliver(looks: Sequence[Look]) -> list[tuple[Run, Message, str, Result]]:
    """Deliver what is still in the outboxes of the runs, by the ways of their jobs and by apprise."""
    host, attempts = socket.gethostname(), []
    for look in {look.status.run_dir: look for look in looks}.values():
        launch = look.status.launch
        if not launch or not (settings := _read_settings(launch)):
            continue
        # The settings name programs that would run, and files that would be read, as the caller.
        if why := why_untrusted(launch.paths.supervisor_settings):
            logger.warning("%s: nothing is delivered: %s", escape(str(look.status.run_dir)), escape(why))
            continue
        tell = telling.from_json(settings.tell)
        run = Run(look.status.run, str(look.status.run_dir), host)
        services = _apprise_services(tell)
        found = deliver_all(run, tell, (*tell.routes(), *services), partial(_deliver, services))
        attempts += [(run, *attempt) for attempt in found]
    return attempts


def _apprise_services(tell: Tell) -> dict[str, str]:
    """Return the addresses of apprise's services by the names of their routes.

    Raises
    ------
    UserError
        If their file cannot be read.
    """
    if not tell.apprise_file:
        return {}
    try:
        lines = read_text(Path(tell.apprise_file).expanduser()).splitlines()
    except (OSError, ValueError) as error:
        why = f"watch.tell.apprise_file={tell.apprise_file}: it cannot be read: {first_line(error)}"
        raise UserError(why, key="watch.tell.apprise_file") from None
    addresses = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return {f"apprise{hashlib.sha256(line.encode()).hexdigest()[:8]}": line for line in addresses}


def _deliver(services: Mapping[str, str], tell: Tell, route: str, run: Run, message: Message) -> None:
    """Deliver a message by apprise, or as a job does."""
    from slipway.watch import routes

    if route not in services:
        return routes.deliver(tell, route, run, message)
    try:
        import apprise
    except ImportError:
        raise UserError("watch.tell.apprise_file needs apprise", hint=install_command("tell")) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its messages may have addresses with secrets
    service = apprise.Apprise()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its many parts, which it imports now, about Pythons to come
        if not service.add(services[route]):
            raise NotDelivered("apprise does not know this kind of address")
    with routes.limit(tell.timeout):
        is_delivered = service.notify(body=compose_text(run, message), title=compose_subject(run, message))
    if not is_delivered:
        raise NotDelivered(f"apprise could not deliver to {services[route].partition(':')[0]}")
    return None


def _read_settings(launch: Launch) -> Settings | None:
    with contextlib.suppress(OSError, ValueError):
        return job_settings.from_json(read_json(launch.paths.supervisor_settings))
    return None


def _job_looked(run_dir: Path, now: float) -> bool:
    """Return True if the run's job looked at its training a short time ago."""
    with contextlib.suppress(OSError, ValueError):
        looked = unix_time(read_json(run_dir / OUTBOX / "job.json").get("time"))
        return looked is not None and now - looked < _JOB_LOOKS_SECONDS
    return False
