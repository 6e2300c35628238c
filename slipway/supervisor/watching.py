"""The watch over a job: what the detectors say goes on record, is told to people, and may end the tasks.

The processes of the hooks read, record and tell: a file system or a receiver that hangs holds up nothing. The
supervisor itself keeps what is remembered of the training from one look to the next.
"""

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import time
from collections import deque
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from slipway.common.files import write_atomic
from slipway.common.node import checkpoints, marks
from slipway.common.node.events import End, Event, EventReader, HeldOut, Start, Train, Validation
from slipway.common.node.progress_lines import READERS, ProgressReader
from slipway.common.node.settings import SLURM
from slipway.supervisor.chain import Ending
from slipway.supervisor.hooks import Hook, Verdict
from slipway.supervisor.job import Job
from slipway.watch import parameters, telling
from slipway.watch.detectors import BLIND, FIRING, QUIET, Reading, read_all, say_duration
from slipway.watch.pace import Schedule
from slipway.watch.windows import ChainState, DiskSpace, Facts, JobState, Window, measure_disk

# The names of the alerts that a run ended before its training was done, and that its tasks start again.
ENDED, RESTARTED = "ended", "restarted"

# As many deliveries may take their longest time before all are ended: those that were not made come next.
_DELIVERIES = 20
# The bytes of metrics that the first look reads, of links before, and the events of each look.
_FIRST_BYTES, _MOST_EVENTS = 1 << 19, 2000
_KINDS: Dict[str, Any] = {kind.__name__: kind for kind in (Start, Train, Validation, End, HeldOut)}
_HOLD = "hold"
# For the last messages of a run.
_LAST_SECONDS = 10.0
# The reactions that end the tasks; they save first only with the first.
_ENDS_TASKS = ("save", "stop", parameters.RESTART)
# Seconds of a look, which may ask all ranks where they stand.
_LOOK_SECONDS = 60.0
_NO_STEP, _HANG = "no_step", "hang"


def watch_training(job: Job) -> Hook:
    """Return the hook that reads the training's events and asks the detectors."""
    watch = _Watch(job)
    every = telling.from_json(job.settings.tell).every
    return Hook("the watch", watch.look, watch.take, _LOOK_SECONDS, every)


def tell_people(job: Job) -> Hook:
    """Return the hook that delivers the run's messages."""
    tell = telling.from_json(job.settings.tell)
    budget = _DELIVERIES * tell.timeout
    return Hook("its messages", deliver, lambda job, answer: None, budget, tell.every, outlives_tasks=True)


class _Watch:
    """The memory of a training, and the looks at it."""

    def __init__(self, job: Job) -> None:
        self._parameters = parameters.from_json(job.settings.watch)
        self._window = Window(self._parameters, Schedule())
        self._reader: Union[EventReader, ProgressReader, None] = None

    def look(self, job: Job) -> Dict[str, Any]:
        """Read what is new, judge and record it; return what the supervisor has to remember.

        With it goes the verdict, if the tasks are to end.
        """
        events, facts = self._read_events(job), _find_facts(job)
        readings, suspects = self._explain_hang(job, events, self._remember(events, facts))
        answer: Dict[str, Any] = {
            "reader": base64.b64encode(pickle.dumps(self._reader)).decode(),
            "events": [(type(event).__name__, *event) for event in events],
            "facts": facts,
            "verdict": None,
        }
        _leave_sign(job, facts.time)
        quiet = [Reading(name, QUIET, "the run goes on") for name in (ENDED, RESTARTED)]
        for message in _record(job, [*readings, *quiet]):
            job.say(f"watch: {message.event}: {message.why} ({message.name})")
            if message.reaction == _HOLD:
                _hold_successors(job)
            elif message.reaction in _ENDS_TASKS:
                rule, continues = message.detector, message.reaction == parameters.RESTART
                answer["verdict"] = (
                    _HANG if continues else rule,
                    message.why,
                    continues,
                    message.reaction == "save",
                    suspects,
                )
        return answer

    def take(self, job: Job, answer: Dict[str, Any]) -> Optional[Verdict]:
        """Remember what a look has found; return the verdict that ends the tasks, if any."""
        self._reader = pickle.loads(base64.b64decode(answer["reader"]))
        events = [_KINDS[kind](*values) for kind, *values in answer["events"]]
        moment, checkpoint, disk, chain, state = answer["facts"]
        facts = Facts(
            moment,
            checkpoint,
            DiskSpace(*disk) if isinstance(disk, list) else disk,
            ChainState(*chain),
            JobState(*state),
        )
        self._remember(events, facts)
        if not answer["verdict"]:
            return None
        rule, why, continues, saves, suspects = answer["verdict"]
        return Verdict(rule, why, continues, saves, tuple(suspects))

    def _explain_hang(
        self, job: Job, events: List[Event], readings: List[Reading]
    ) -> Tuple[List[Reading], Sequence[str]]:
        """Let the ranks say why there is no step, before people are told; return the suspect hosts as well.

        Ranks that still move may only be slow: they are not ended before the time of a pause is over, and
        not at all where nobody can read steps. What comes meanwhile is added to `events`.
        """
        from slipway.watch import alerts

        own = self._parameters.no_step
        restarts = own.reaction == parameters.RESTART
        index = next((at for at, each in enumerate(readings) if each.detector == _NO_STEP), None)
        if index is None:
            return readings, ()
        reading, listens = readings[index], readings[index].state == BLIND and restarts
        if listens:
            reading = _listen(job, self._window.now, own.first)
        hosts: Sequence[str] = ()
        names = [alert.first.detector for alert in alerts.open_alerts(job.settings.run_dir)]
        if reading.state == FIRING and _NO_STEP not in names:
            with job.best_effort("the ranks could not be asked where they stand"):
                from slipway.supervisor import hangs

                inquiry = hangs.find_hang(job)
                hosts, why = inquiry.hang.hosts, f"{reading.why}: {inquiry.hang.why}"
                is_short = listens or self._window.now - (reading.since or 0.0) <= own.pause
                later = self._read_events(job)
                events += later
                if later or (listens and _listen(job, self._window.now, own.first).state == QUIET):
                    reading = reading._replace(state=QUIET, why="it goes on")
                elif inquiry.hang.moves:
                    state = QUIET if restarts and is_short else FIRING
                    reading = reading._replace(state=state, why=f"{why}; the ranks still move")
                else:
                    reading = reading._replace(why=why)
                if reading.state == FIRING:
                    hangs.keep(job, inquiry)
        return [*readings[:index], reading, *readings[index + 1 :]], hosts

    def _remember(self, events: Sequence[Event], facts: Facts) -> List[Reading]:
        for event in events:
            self._window.take(event)
        self._window.take_facts(facts)
        return read_all(self._window, self._parameters)

    def _read_events(self, job: Job) -> List[Event]:
        """Return the new events, of very many the last ones."""
        if self._reader is None:
            self._reader = _open_reader(job)
        return list(deque(self._reader.stream(), maxlen=_MOST_EVENTS))


def _listen(job: Job, now: float, limit: float) -> Reading:
    """Return that a job whose steps nobody can read hangs, if its log has not grown for so long."""
    moments = [float(job.tasks_began)]
    for extension in (".out", ".err"):
        with contextlib.suppress(OSError):
            moments.append(os.stat(f"{job.settings.log}{job.id}{extension}").st_mtime)
    since = max(moments)
    why = f"no output for {say_duration(now - since)}"
    return Reading(_NO_STEP, FIRING if now - since > limit else QUIET, why, since=since)


def _open_reader(job: Job) -> Union[EventReader, ProgressReader]:
    """Return the reader of the file of events, with what the links before have left; or of this job's log."""
    settings = job.settings
    if settings.engine in READERS:
        return READERS[settings.engine](f"{settings.log}{job.id}.out")
    path = settings.metrics or ""
    try:
        return EventReader(path, max(os.stat(path).st_size - _FIRST_BYTES, 0))
    except OSError:
        return EventReader(path)


def _find_facts(job: Job) -> Facts:
    settings, chain = job.settings, job.settings.chain
    newest: Union[int, str] = "the job has no directory of checkpoints"
    if settings.checkpoints:
        progress = checkpoints.progress(settings.checkpoints, settings.engine)
        newest = progress.step if progress else 0
    seconds = marks.time_limit(job.directory, job.attempt)
    return Facts(
        time.time(),
        newest,
        measure_disk(settings.results or settings.run_dir),
        ChainState(
            job.link,
            chain.links,
            None if job.by_hand else marks.job_of(job.directory, job.link + 1) is not None,
            job.began + seconds if seconds else None,
        ),
        JobState("RUNNING", False, float(job.tasks_began)),
    )


def _leave_sign(job: Job, now: float) -> None:
    """Leave the time of this look, so that the login node leaves the training to the job."""
    from slipway.watch.alerts import OUTBOX

    with contextlib.suppress(OSError):
        directory = os.path.join(job.settings.run_dir, OUTBOX)
        os.makedirs(directory, exist_ok=True)
        content = json.dumps({"job": job.id, "time": now})
        write_atomic(os.path.join(directory, "job.json"), content + "\n", sync=False)


def _record(job: Job, readings: Sequence[Reading]) -> "Sequence[Any]":
    """Record the readings; where nothing can be written, return the messages all the same."""
    from slipway.watch import alerts  # late: the supervisor itself needs none of it

    settings = parameters.from_json(job.settings.watch)._asdict()
    reactions = {
        name: own.reaction for name, own in settings.items() if own.reaction in (_HOLD, *_ENDS_TASKS)
    }
    origin = alerts.Origin(job.settings.launch, job.link, job.id)
    try:
        return alerts.record(job.settings.run_dir, readings, origin, reactions)
    except OSError as error:
        job.say(f"watch: {alerts.ALERTS} could not be written: {error.strerror}")
        return alerts.judge(
            [], [each for each in readings if each.state == FIRING], time.time(), origin, reactions
        )


def _hold_successors(job: Job) -> None:
    from slipway.supervisor.slurm import Slurm

    later = [name for link, name in marks.later_jobs(job.directory).items() if link > job.link]
    if job.settings.scheduler == SLURM and later and Slurm(job).hold(later):
        job.say(f"watch: holds job {','.join(later)}; slipway release lets it go on")


def deliver(job: Job) -> None:
    """Deliver the run's messages, and touch the dead man's switch if no alert is open."""
    from slipway.watch import alerts, outbox
    from slipway.watch.messages import Run

    tell = telling.from_json(job.settings.tell)
    run = Run(job.settings.run, job.settings.run_dir, socket.gethostname())
    for message, route, result in outbox.deliver_all(run, tell):
        if result.state != outbox.SENT:
            job.say(f"watch: {message.name} was not delivered by {route}: {result.why}")
    if (tell.alive.file or tell.alive.url_file) and not alerts.open_alerts(run.directory):
        from slipway.watch import routes

        routes.touch(tell)


def tell_end(job: Job, ending: Ending, goes_on: bool) -> None:
    """Tell people that the run ended before its training was done; one that is done or cancelled ends alerts.

    If the next link goes on, it tells them what this one has not: a receiver that hangs holds up no link.
    """
    if goes_on and ending.verdict != "done":
        return

    def tell() -> None:
        _record_end(job, ending)
        _deliver_last(job)

    _call_in_child(job, tell)


def tell_restart(job: Job, ending: Ending) -> None:
    """Record, to be told while the tasks run again, that they ended and start once more."""
    reading = Reading(RESTARTED, FIRING, f"the tasks start again: {ending.why}", since=time.time())
    _call_in_child(job, lambda: _record(job, [reading]))


def _call_in_child(job: Job, call: Callable[[], object]) -> None:
    """Call a function in another process for a while: a file system or a receiver may hang."""
    process = os.fork()
    if not process:
        try:
            with job.best_effort("people are not told of the end of its tasks"):
                call()
        finally:
            os._exit(0)
    end = time.monotonic() + _LAST_SECONDS
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            break
        time.sleep(0.05)


def _deliver_last(job: Job) -> None:
    """Deliver until nothing is under way: a delivery that began before the tasks ended goes on."""
    from slipway.watch import outbox

    deliver(job)
    while outbox.CLAIMED in [each.state for each in outbox.find_last_attempts(job.settings.run_dir).values()]:
        time.sleep(0.2)
        deliver(job)


def _record_end(job: Job, ending: Ending) -> None:
    from slipway.watch import alerts

    names = [alert.first.detector for alert in alerts.open_alerts(job.settings.run_dir)]
    if ending.verdict == "done" or ending.rule == "cancelled":
        _record(job, [Reading(name, QUIET, ending.why) for name in names])
    elif (
        _NO_STEP if ending.rule == _HANG else ending.rule
    ) not in names:  # its detector has an alert already
        over = Reading(RESTARTED, QUIET, ending.why)
        _record(job, [over, Reading(ENDED, FIRING, f"the run has ended: {ending.why}", since=time.time())])
