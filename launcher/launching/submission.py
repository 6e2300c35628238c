"""Submission of a script, once: a lost answer never becomes a second job.

Where an answer is lost, the job is looked for by its tag, and submitted again only when the scheduler has
answered that it knows none. It may take the first submission after that, so that there are two. The claim of
the launch, ``marks/job``, then decides which of them is its job: `slipway.common.node.marks`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from launcher.config.overrides import typed_override
from launcher.errors import UserError
from launcher.runs.receipts import submitted_jobs
from launcher.schedulers.base import Acceptance, NoAnswer, Scheduler, Submission
from launcher.slurm.commands import SchedulerSilent
from launcher.slurm.queue_flags import QueueFlags
from launcher.slurm.states import Action
from slipway.common.backoff import double_wait
from slipway.common.node.marks import GIVEN_UP, claim

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 16.0

# Variables that a user sets in the shell, and the key that takes the same value.
_KEYS = {
    **{f"SBATCH_{field.name.upper()}": f"cluster.{field.name}" for field in fields(QueueFlags)},
    "SBATCH_TIMELIMIT": "training.run.time_limit",
    "SBATCH_GRES": "cluster.gres",
    "SBATCH_GPUS_PER_NODE": "cluster.gpus_per_node",
    "SBATCH_GPUS_PER_TASK": "cluster.gpus_per_task",
    "SBATCH_MEM_PER_NODE": "cluster.mem",
    "SBATCH_JOB_NAME": "training.run.name",
    "SBATCH_REQ_SWITCH": "cluster.switches",
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Tries at growing intervals, for a number of seconds."""

    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def tries(self) -> Iterator[None]:
        """Try at once, and again until the time is up."""
        yield
        yield from self.waits()

    def waits(self) -> Iterator[None]:
        """Wait, each time twice as long as before, until the time is up; once at the least."""
        end = self.clock() + self.seconds
        for attempt in itertools.count():
            wait = double_wait(attempt, _FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
            self.sleep(max(0.0, min(wait, end - self.clock())))
            yield
            if self.clock() >= end:
                return


# How long a lost job is looked for.
BACKOFF = Backoff()


def describe_ignored(variables: Mapping[str, str], stage: str = "training") -> list[str]:
    """Return a message for each variable that would have changed a submission, and does not."""
    messages = []
    for name, value in variables.items():
        if name.startswith("SBATCH_"):
            key = _KEYS.get(name, "").replace("training.", f"{stage}.") if value else None
            instead = f"; instead: {typed_override(key, value)}" if key else ""
            messages.append(f"{name}={value} of your shell is not passed on to sbatch{instead}")
    allocation = [name for name in variables if name.startswith("SLURM_")]
    if allocation:
        job = variables.get("SLURM_JOB_ID")
        of_job = f"of job {job}, in which you are, " if job else ""
        names = ", ".join(allocation[:3]) + (", ..." if len(allocation) > 3 else "")
        messages.append(f"SLURM_* variables {of_job}are not passed on to sbatch: {names}")
    return messages


def validate(scheduler: Scheduler, script_text: str) -> Acceptance:
    """Let the scheduler judge a script, and ask again while it does not answer; see `Scheduler.validate`."""
    silence: SchedulerSilent | None = None
    for _ in BACKOFF.tries():
        if silence is not None:
            _logger.warning("%s; asking again ...", silence.message)
        try:
            return scheduler.validate(script_text)
        except SchedulerSilent as error:
            silence = error
    assert silence is not None
    raise UserError(silence.message, hint="nothing was launched; try again when it does") from silence


def submit(scheduler: Scheduler, submission: Submission) -> str:
    """Submit a script that lies in its launch directory; return the id of the one job that it became.

    Raise NoAnswer if it is not known whether there is a job, after all patience; UserError if the scheduler
    refuses: then there is no job, nor will there be one.
    """
    job = _submit_with_retries(scheduler, submission)
    submitted_jobs[job] = submission.script.parent
    return job


def _submit_with_retries(scheduler: Scheduler, submission: Submission) -> str:
    try:
        return scheduler.submit(submission)
    except NoAnswer as error:
        lost = error
    logged = ""
    for _ in BACKOFF.waits():
        reason = "still no answer" if lost.message == logged else lost.message
        _logger.warning("%s; looking for the job by its tag ...", reason)
        logged = lost.message
        try:
            jobs = _find(scheduler, submission)
        except UserError as error:
            lost = NoAnswer(error.message.splitlines()[0])
            continue
        if jobs:
            return keep_one(scheduler, submission, jobs)
        _logger.warning("there is no such job; submitting it again ...")
        try:
            newest = scheduler.submit(submission)
        except NoAnswer as error:
            lost = error
        except UserError as refusal:
            return _settle_refusal(scheduler, submission, refusal)
        else:
            return keep_one(scheduler, submission, [*_find_if_possible(scheduler, submission), newest])
    jobs = _find_if_possible(scheduler, submission)
    if jobs:
        return keep_one(scheduler, submission, jobs)
    raise lost


def keep_one(scheduler: Scheduler, submission: Submission, jobs: Sequence[str]) -> str:
    """Keep one of the jobs of a submission, the oldest if none began, and cancel the others.

    Raise UserError if a later launcher has given this launch up: its jobs leave without doing anything.
    """
    # Not always the oldest: a younger one may have begun, and the oldest would then leave.
    kept = claim(submission.script.parent, jobs[0], submission.link)
    for job in dict.fromkeys(jobs):
        if job == kept:
            continue
        _logger.warning("job %s is a second one of the same launch: cancelling it", job)
        for error in scheduler.act(Action.CANCEL, [job]).values():
            harmless = "it does no harm: such a job leaves before it does anything"
            _logger.warning("%s; %s", error.message, harmless)
    if kept == GIVEN_UP:
        raise UserError("a later launch of this run has given this one up", hint="launch again")
    return kept


def _settle_refusal(scheduler: Scheduler, submission: Submission, refusal: UserError) -> str:
    """Return the job of the first submission, if it made one, or raise the refusal of the second."""
    jobs = _find_if_possible(scheduler, submission)
    if jobs:
        return keep_one(scheduler, submission, jobs)
    kept = claim(submission.script.parent, GIVEN_UP, submission.link)
    if kept == GIVEN_UP:
        raise refusal
    return kept


def _find(scheduler: Scheduler, submission: Submission) -> list[str]:
    jobs_by_link = scheduler.find([submission]).get(submission.tag, {})
    return list(jobs_by_link.get(submission.link, ()))


def _find_if_possible(scheduler: Scheduler, submission: Submission) -> list[str]:
    with contextlib.suppress(UserError):
        return _find(scheduler, submission)
    return []
