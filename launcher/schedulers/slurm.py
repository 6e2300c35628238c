"""Slurm: submission through submitit, all else through Slurm's own commands."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import UserError, file_mode
from launcher.runs.files import link_or_copy
from launcher.runs.paths import submitted_name
from launcher.runs.provenance import user
from launcher.schedulers.base import Intent, JobStatus, Ticket
from launcher.schedulers.chains import of_chain
from launcher.schedulers.states import of_ticket
from launcher.slurm import job_actions as actions
from launcher.slurm.commands import (
    NO_SLURM,
    WITHOUT_SLURM,
    Answer,
    Retry,
    SchedulerSilent,
    Unreachable,
    ask,
    error_text,
    says_no_slurm,
    says_unanswered,
)
from launcher.slurm.environment import clean_environment, describe_ignored, inherited_variables
from launcher.slurm.hostlists import expand_tasks
from launcher.slurm.job_questions import JobQuestions
from launcher.slurm.records import Record, by_job, script_of
from supervisor.marks import cancelled_at, read_lives

# What `sbatch --test-only` rejects and sbatch itself queues: nodes that are drained, busy or not enough now.
_WOULD_WAIT = (
    "Requested node configuration is not available",
    "Requested nodes are busy",
    "Required node not available",
    "Requested partition configuration not available now",
    "Requested reservation is in use",
)

# Slurm's own default of MaxArraySize, for a configuration that does not tell it.
_DEFAULT_ARRAY = 1001

_VERB_SECONDS = 60.0

# When jobs without marks ended, by their Slurm's configuration, their launch and their id: Slurm is asked
# once, however often a run is looked at.
_ends: dict[tuple[str | None, Path, str], float | None] = {}

# One for all, so that a controller that is silent is not asked anew for each question.
_RETRY = Retry()


class SlurmScheduler:
    """The Slurm that `slurm_conf` describes, or the site's own where it is ``None``.

    Parameters
    ----------
    retry
        How long to wait for a controller that does not answer.
    """

    def __init__(self, slurm_conf: str | None = None, retry: Retry = _RETRY) -> None:
        self._slurm_conf = slurm_conf
        self._environment = clean_environment(slurm_conf)
        self._retry = retry
        self._questions = JobQuestions(self._environment, retry)

    def validate(self, script_text: str) -> str | None:
        """Let sbatch judge the script without submitting it; see `Scheduler.validate`."""
        self._require_configuration()
        answer = ask(["sbatch", "--test-only"], self._environment, stdin=script_text)
        if answer.code == 0:
            return None
        told = error_text(answer.stderr)
        if any(reason in answer.stderr for reason in _WOULD_WAIT):
            return f"as the cluster is now, the job would wait: {told}"
        if says_no_slurm(answer.stderr):
            raise Unreachable(
                f"{NO_SLURM}: {told}",
                hint=f"SLURM_CONF names the configuration of one that is elsewhere; {WITHOUT_SLURM}",
            )
        if says_unanswered(told):
            raise SchedulerSilent(f"Slurm does not answer: {told} (sbatch --test-only)")
        raise UserError(f"Slurm would refuse this job: {told}")

    def ignored_environment(self) -> list[str]:
        """Say which variables sbatch would have read; see `Scheduler.ignored_environment`."""
        return describe_ignored(os.environ)

    def submit(
        self, script: Path, tag: str, *, link: int = 1, after: str | None = None, exclude: str | None = None
    ) -> str:
        """Submit a script; see `Scheduler.submit`."""
        # Imported late: a dry run needs no submitit.
        from launcher.schedulers.submission import submit_script

        unset = inherited_variables(os.environ)
        arguments = [tag] if link == 1 else [str(link), tag]
        named = submitted_name(script, tag, link)
        try:
            link_or_copy(named, script)
        except OSError as error:
            raise UserError(f"cannot write {named}: {error.strerror}") from error
        return submit_script(named, arguments, unset, self._slurm_conf, after, exclude)

    def find(self, intents: Sequence[Intent]) -> Mapping[str, Sequence[str]]:
        """Look for jobs by the names of their scripts, in the queue and in the accounting."""
        return {
            tag: sorted({job for jobs in links.values() for job in jobs}, key=_in_order)
            for tag, links in self.find_links(intents).items()
        }

    def find_links(self, intents: Sequence[Intent]) -> Mapping[str, Mapping[int, Sequence[str]]]:
        """Look for the jobs of chains in the same way; see `Scheduler.find_links`."""
        if not intents:
            return {}
        self._require_configuration()
        queued = self._questions.queue_of({intent.user for intent in intents})
        recent = self._questions.accounting_since([(intent.user, intent.since) for intent in intents])
        wanted = {(intent.tag, intent.link) for intent in intents}
        found: dict[str, dict[int, set[str]]] = {}
        for record in (*queued, *recent):
            tag = record.tag
            if tag is not None and not wanted.isdisjoint(((tag, record.link), (tag, None))):
                found.setdefault(tag, {}).setdefault(record.link, set()).add(record.parent_id)
        return {
            tag: {link: sorted(jobs, key=_in_order) for link, jobs in links.items()}
            for tag, links in found.items()
        }

    def locate(self, job_id: str) -> Path | None:
        """The script of a job, from the queue or the accounting; see `Scheduler.locate`."""
        self._require_configuration()
        known = self._questions.queue([job_id]) or self._questions.accounting([job_id])
        return script_of(known[-1]) if known else None

    def scripts(self) -> Sequence[Path]:
        """The scripts of this user's jobs in the queue; see `Scheduler.scripts`."""
        self._require_configuration()
        found = map(script_of, self._questions.queue_of({user()}))
        return [script for script in found if script is not None]

    def statuses(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Ask squeue once and, for jobs that it does not know all of, sacct once."""
        if not tickets:
            return {}
        self._require_configuration()
        each = [one for ticket in tickets for one in ticket.each]
        # Of an array once, however many of its tasks are points of a sweep.
        live = by_ticket(each, self._questions.queue([one.of for one in each]))
        # While a link of a chain lives, the others are told by their own marks.
        ended = [
            one.of
            for ticket in tickets
            if not any(_queue_tells_all(one, live[one]) for one in ticket.each)
            for one in ticket.each
        ]
        accounted = by_ticket(each, self._questions.accounting(ended) if ended else ())
        blind = self._questions.unaccounted
        told = self._with_ends({one: of_ticket(one, live[one], accounted[one], blind) for one in each})
        return {ticket.tag: of_chain(ticket, [told[one] for one in ticket.each]) for ticket in tickets}

    def _with_ends(self, told: Mapping[Ticket, JobStatus]) -> dict[Ticket, JobStatus]:
        """Add when jobs ended that left no mark of it, such as one that was cancelled while it waited."""
        unknown = {
            one: (self._slurm_conf, one.launch_dir, one.job_id)
            for one, status in told.items()
            if _left_no_mark(one, status)
        }
        fresh = {key: one.job_id for one, key in unknown.items() if key not in _ends}
        if fresh:
            with contextlib.suppress(UserError):  # that Slurm answers no more is no news of these
                ends = self._questions.ends([*fresh.values()])
                _ends.update({key: ends.get(job_id) for key, job_id in fresh.items()})
        return {**told, **{one: replace(told[one], ended=_ends.get(key)) for one, key in unknown.items()}}

    def largest_array(self) -> int:
        """How many tasks a job array may have.

        Raises
        ------
        UserError
            If Slurm cannot be asked.
        """
        self._require_configuration()
        answer = self._retry.ask(["scontrol", "show", "config"], self._environment)
        if answer.code != 0:
            raise UserError(f"Slurm does not tell its configuration: {error_text(answer.stderr)}")
        told = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
        return int(told[1]) if told else _DEFAULT_ARRAY

    def cancel(self, job_id: str) -> None:
        actions.cancel(self._run, job_id, self._known(job_id))

    def cancel_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        return actions.many(actions.cancel_many, self._run, job_ids, self._known_of)

    def save_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        return actions.many(actions.save_many, self._run, job_ids, self._known_of)

    def hold_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        return actions.many(actions.hold_many, self._run, job_ids, self._known_of)

    def release_all(self, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        return actions.many(actions.release_many, self._run, job_ids, self._known_of)

    def save(self, job_id: str) -> None:
        actions.save(self._run, job_id, self._known(job_id))

    def hold(self, job_id: str) -> None:
        actions.hold(self._run, job_id, self._known(job_id))

    def release(self, job_id: str) -> None:
        actions.release(self._run, job_id, self._known(job_id))

    def _known(self, job_id: str) -> list[Record]:
        self._require_configuration()
        return self._questions.queue([job_id])

    def _known_of(self, job_ids: Sequence[str]) -> dict[str, Sequence[Record]]:
        """What the queue has of many jobs, or tasks of arrays, in one question."""
        self._require_configuration()
        return by_id(job_ids, self._questions.queue([job_id.partition("_")[0] for job_id in job_ids]))

    def _run(self, command: Sequence[str]) -> Answer:
        # Longer than a question: what is cut short may be done all the same.
        return self._retry.ask(command, self._environment, timeout=_VERB_SECONDS)

    def _require_configuration(self) -> None:
        if self._slurm_conf is not None and not file_mode(Path(self._slurm_conf)):
            raise Unreachable(
                f"cluster.slurm_conf={self._slurm_conf!r}: no such file",
                hint="for cluster=sandbox, boot it first: slipway sandbox up",
            )


def _left_no_mark(ticket: Ticket, status: JobStatus) -> bool:
    """Whether a job is over, never began as far as it left marks, and nobody noted when it was cancelled."""
    if not status.state.is_final or status.elapsed not in (None, "00:00:00"):
        return False
    launch_dir, job_id = ticket.launch_dir, ticket.job_id
    return cancelled_at(launch_dir, job_id) is None and not read_lives(launch_dir, job_id)


def _queue_tells_all(ticket: Ticket, records: Sequence[Record]) -> bool:
    """Whether the accounting has nothing to add: a job, or one task of an array, that waits or runs.

    Of a whole array it always has: the queue forgets its tasks one by one.
    """
    ours = [record for record in records if record.tag == ticket.submitted_with]
    task = None if ticket.task is None else str(ticket.task)
    return any(record.state.is_live and record.task == task for record in ours)


def _in_order(job_id: str) -> tuple[int, str]:
    """Ids of jobs in the order in which they were given."""
    return (int(job_id) if job_id.isdigit() else 0, job_id)


def by_ticket(tickets: Sequence[Ticket], records: Iterable[Record]) -> Mapping[Ticket, Sequence[Record]]:
    """The records that each ticket is about.

    Of a task these are its own; where there is none, one of another task tells that the array is known.
    """
    found = by_job(records)
    # Slurm tells those that wait together in one record: each array is taken apart once.
    apart = {job: _by_task(found.get(job, ())) for job in {t.of for t in tickets if t.task is not None}}
    return {ticket: _of(ticket, found, apart) for ticket in tickets}


def by_id(job_ids: Sequence[str], records: Iterable[Record]) -> dict[str, Sequence[Record]]:
    """The records of each job, of an array's task those that are about it; nothing where there are none."""
    found = by_job(records)
    tasks = {job_id: job_id.partition("_") for job_id in job_ids}
    apart = {of: _by_task(found.get(of, ())) for of, _, task in tasks.values() if task}
    return {
        job_id: apart[of].get(int(task), ()) if task else found.get(of, ())
        for job_id, (of, _, task) in tasks.items()
    }


def _of(
    ticket: Ticket, found: Mapping[str, Sequence[Record]], apart: Mapping[str, Mapping[int, list[Record]]]
) -> Sequence[Record]:
    whole = found.get(ticket.of, ())
    return whole if ticket.task is None else apart[ticket.of].get(ticket.task) or whole[:1]


def _by_task(records: Sequence[Record]) -> dict[int, list[Record]]:
    apart: dict[int, list[Record]] = {}
    for record in records:
        for number in expand_tasks(record.task or ""):
            apart.setdefault(number, []).append(replace(record, job_id=f"{record.parent_id}_{number}"))
    return apart
