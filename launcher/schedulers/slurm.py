"""Slurm: submission through submitit, all else through Slurm's own commands."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import UserError, escape, file_mode
from launcher.runs.paths import SCRIPT_SUFFIX, SUBMITTED, submitted_name
from launcher.runs.provenance import user
from launcher.schedulers.base import Acceptance, FoundJobs, JobRef, JobStatus, NotHeld, Submission
from launcher.schedulers.chain_status import status_of_chain
from launcher.schedulers.job_status import status_of_job
from launcher.slurm import commands
from launcher.slurm.cluster import parse_settings
from launcher.slurm.commands import Answer, Retry, SchedulerSilent, Unreachable, error_text
from launcher.slurm.environment import clean_environment, inherited_variables
from launcher.slurm.notations import expand_tasks
from launcher.slurm.questions import JobQuestions
from launcher.slurm.records import Record, group_by_job, script_of
from launcher.slurm.states import HELD_STATES, Action, State
from slipway.common.node.marks import cancelled_at, chain_end

# Messages of `sbatch --test-only` about jobs that sbatch itself queues: nodes are drained, busy or too few.
_WOULD_WAIT = (
    "Requested node configuration is not available",
    "Requested nodes are busy",
    "Required node not available",
    "Requested partition configuration not available now",
    "Requested reservation is in use",
)

# Slurm's own default of MaxArraySize, for a configuration without it.
_DEFAULT_ARRAY = 1001

# When jobs without marks ended, by their Slurm's configuration, their launch and their id: Slurm is asked
# only once, however often a status is shown.
_ends: dict[tuple[str | None, Path, str], float | None] = {}

# Shared, so that a silent controller is not tried again for each question.
_RETRY = Retry()


class SlurmScheduler:
    """The Slurm that `slurm_conf` describes, by default the site's own."""

    def __init__(self, slurm_conf: str | None = None, retry: Retry = _RETRY) -> None:
        self._slurm_conf = slurm_conf
        self._environment = clean_environment(slurm_conf)
        self._retry = retry
        self._questions = JobQuestions(self._environment, retry)

    def validate(self, script_text: str) -> Acceptance:
        """Show the script to ``sbatch --test-only``; see `Scheduler.validate`."""
        self._require_configuration()
        self._require_cluster()
        # A file and not the input: a site's own sbatch may read the script first.
        with tempfile.NamedTemporaryFile("wb", prefix="slipway-", suffix=SCRIPT_SUFFIX) as script:
            script.write(script_text.encode("utf-8", "surrogateescape"))
            script.flush()
            answer = commands.ask(["sbatch", "--test-only", script.name], self._environment)
        if answer.code == 0:
            return Acceptance(notice=commands.notice_of(f"{answer.stdout}\n{answer.stderr}"))
        message = error_text(answer.stderr)
        if any(reason in answer.stderr for reason in _WOULD_WAIT):
            return Acceptance(f"as the cluster is now, the job would wait: {message}")
        if commands.says_no_slurm(answer.stderr):
            raise Unreachable(
                commands.NO_SLURM,
                hint=f"SLURM_CONF names the configuration of one that is elsewhere; {commands.WITHOUT_SLURM}",
            )
        if commands.says_unanswered(message):
            raise SchedulerSilent(f"Slurm does not answer: {message} (sbatch --test-only)")
        raise UserError(f"Slurm would refuse this job: {message}")

    def ignored_environment(self) -> dict[str, str]:
        """Return the variables that sbatch would have read; see `Scheduler.ignored_environment`."""
        return {name: os.environ[name] for name in inherited_variables(os.environ)}

    def submit(self, submission: Submission) -> str:
        # Imported late: a dry run needs no submitit.
        from launcher.schedulers.submission import submit_script

        return submit_script(submission, self._slurm_conf)

    def find(self, submissions: Sequence[Submission]) -> FoundJobs:
        """Find jobs by the names of their scripts, in the queue and in the accounting."""
        if not submissions:
            return {}
        self._require_configuration()
        dated = [(submission.user, submission.since) for submission in submissions]
        queued = self._questions.queue_of({user for user, _ in dated})
        jobs_of: dict[str, dict[int, set[str]]] = {submission.tag: {} for submission in submissions}
        for record in (*queued, *self._questions.accounting_since(dated)):
            if record.tag in jobs_of:
                jobs_of[record.tag].setdefault(record.link, set()).add(record.parent_id)
        return {
            tag: {
                link: sorted(jobs, key=lambda job_id: (len(job_id), job_id)) for link, jobs in links.items()
            }
            for tag, links in jobs_of.items()
            if links
        }

    def locate(self, job_id: str) -> Path | None:
        """Return the script of a job, from the queue or the accounting; see `Scheduler.locate`."""
        self._require_configuration()
        records = self._questions.queue([job_id]) or self._questions.accounting([job_id])
        return script_of(records[-1]) if records else None

    def scripts(self) -> Sequence[Path]:
        """Return the scripts of this user's jobs in the queue; see `Scheduler.scripts`."""
        self._require_configuration()
        scripts = map(script_of, self._questions.queue_of({user()}))
        return [script for script in scripts if script is not None]

    def statuses(self, refs: Sequence[JobRef]) -> list[JobStatus]:
        """Ask squeue once and, for jobs with incomplete records, sacct once."""
        if not refs:
            return []
        self._require_configuration()
        jobs = [job for ref in refs for job in ref.jobs]
        job_ids = [job.job_id for job in jobs]
        # An array is asked for once, however many of its tasks are points of a sweep.
        queued = self._questions.queue([job.parent_id for job in jobs])
        live = _records_of(job_ids, queued, or_array=True)
        self._recognize(jobs, live)
        # While a link of a chain lives, marks show how the others ended.
        ended = [
            job.parent_id
            for ref in refs
            if not any(_queue_tells_all(job, live[job.job_id]) for job in ref.jobs)
            for job in ref.jobs
        ]
        past = self._questions.accounting(ended) if ended else ()
        accounted = _records_of(job_ids, past, or_array=True)
        blind = self._questions.unaccounted
        group_by_job = (status_of_job(job, live[job.job_id], accounted[job.job_id], blind) for job in jobs)
        statuses = iter(self._add_ends(jobs, list(group_by_job)))
        return [status_of_chain(ref, list(itertools.islice(statuses, len(ref.links)))) for ref in refs]

    def _recognize(self, jobs: Sequence[JobRef], live: dict[str, Sequence[Record]]) -> None:
        """Give the records of jobs whose log is in their launch's directory the script of that launch.

        A site's own sbatch may submit a copy of a script; since Slurm 23.02 only the log shows that.
        """
        strange = [job for job in jobs if {record.tag for record in live[job.job_id]} == {None}]
        outputs = self._questions.outputs([job.parent_id for job in strange]) if strange else {}
        for job in strange:
            directory = os.path.realpath(Path(outputs.get(job.job_id, "/").replace("%%", "%")).parent)
            if directory == os.path.realpath(job.launch_dir):
                script = str(submitted_name(job.launch_dir / SUBMITTED, job.submitted_tag))
                live[job.job_id] = [replace(record, command=script) for record in live[job.job_id]]

    def _add_ends(self, jobs: Sequence[JobRef], statuses: Sequence[JobStatus]) -> list[JobStatus]:
        """Add when jobs without a mark of their end ended, such as one that was cancelled while it waited."""
        keys = [
            (self._slurm_conf, job.launch_dir, job.job_id) if _left_no_mark(job, status) else None
            for job, status in zip(jobs, statuses, strict=True)
        ]
        fresh = {key for key in keys if key is not None and key not in _ends}
        if fresh:
            with contextlib.suppress(UserError):  # without an answer the time stays unknown
                ends = self._questions.ends([job_id for _, _, job_id in fresh])
                _ends.update({key: ends.get(key[2]) for key in fresh})
        return [
            status if key is None else replace(status, ended=_ends.get(key))
            for key, status in zip(keys, statuses, strict=True)
        ]

    def ask_largest_array(self) -> int:
        """Return the largest number of tasks of a job array; raise UserError if Slurm cannot be asked."""
        self._require_configuration()
        answer = self._retry.ask(["scontrol", "show", "config"], self._environment)
        if answer.code != 0:
            raise UserError(f"Slurm does not show its configuration: {error_text(answer.stderr)}")
        largest = parse_settings(answer.stdout).max_array
        return _DEFAULT_ARRAY if largest is None else largest

    def act(self, action: Action, job_ids: Sequence[str]) -> Mapping[str, UserError]:
        return act(action, job_ids, self._run, self._queued_by_id)

    def _queued_by_id(self, job_ids: Sequence[str]) -> dict[str, Sequence[Record]]:
        """Return the records of many jobs, or tasks of arrays, in the queue, with one question."""
        self._require_configuration()
        return _records_of(job_ids, self._questions.queue([job_id.partition("_")[0] for job_id in job_ids]))

    def _run(self, command: Sequence[str]) -> Answer:
        return self._retry.ask(command, self._environment)

    def _require_cluster(self) -> None:
        """Refuse to submit to another cluster than the one that the user's shell names."""
        name = next(filter(None, map(os.environ.get, ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"))), None)
        if name is None or self._slurm_conf is not None:
            return
        answer = self._retry.ask(["scontrol", "show", "config"], self._environment)
        here = parse_settings(answer.stdout).name
        if here is not None and name != here:
            raise UserError(
                f"SLURM_CLUSTERS={escape(name)} of your shell: jobs go to cluster {here}",
                hint="cluster.slurm_conf=FILE, the configuration of the other one; or unset SLURM_CLUSTERS",
            )

    def _require_configuration(self) -> None:
        if self._slurm_conf is not None and not file_mode(Path(self._slurm_conf)):
            raise Unreachable(
                f"cluster.slurm_conf={self._slurm_conf!r}: no such file",
                hint="for cluster=sandbox, boot it first: slipway sandbox up",
            )


def _left_no_mark(ref: JobRef, status: JobStatus) -> bool:
    """Return True if a job ended without marks of its start, of a cancellation and of its chain's end."""
    if not status.state.is_final or status.elapsed not in (None, "00:00:00"):
        return False
    directory = ref.launch_dir
    is_marked = ref.attempts(ref.job_id) or cancelled_at(directory, ref.job_id) or chain_end(directory)
    return not is_marked


def _queue_tells_all(ref: JobRef, records: Sequence[Record]) -> bool:
    """Return True if the accounting is not needed: a job, or one task of an array, waits or runs.

    A whole array needs it: the queue forgets its tasks one by one.
    """
    ours = [record for record in records if record.tag == ref.submitted_tag]
    task = None if ref.task is None else str(ref.task)
    return any(record.state.is_live and record.task == task for record in ours)


def _records_of(
    job_ids: Sequence[str], records: Iterable[Record], or_array: bool = False
) -> dict[str, Sequence[Record]]:
    """Return the records of each job, or of the array's task with that id; empty without records.

    With `or_array` a task without records gets one of another task, because the array is known.
    """
    by_parent = group_by_job(records)
    parts = {job_id: job_id.partition("_") for job_id in job_ids}
    # Slurm has one record for all tasks that wait together: each array is taken apart once.
    arrays = {parent for parent, _, task in parts.values() if task}
    tasks = {parent: _group_by_task(by_parent.get(parent, ())) for parent in arrays}
    records_of: dict[str, Sequence[Record]] = {}
    for job_id, (parent, _, task) in parts.items():
        whole = by_parent.get(parent, ())
        other = whole[:1] if or_array else ()
        records_of[job_id] = (tasks[parent].get(int(task)) or other) if task else whole
    return records_of


def _group_by_task(records: Sequence[Record]) -> dict[int, list[Record]]:
    by_task: dict[int, list[Record]] = {}
    for record in records:
        for number in expand_tasks(record.task or ""):
            by_task.setdefault(number, []).append(replace(record, job_id=f"{record.parent_id}_{number}"))
    return by_task


# --- actions on jobs

# The queue is asked first: ``scancel`` of a job that is over exits 0, and so does ``scontrol hold`` of a
# running one, which is then held when it is requeued.

# The records of jobs in the queue, by their ids.
Known = Mapping[str, Sequence[Record]]
Ask = Callable[[Sequence[str]], Known]
Run = Callable[[Sequence[str]], Answer]

_COMMANDS = {
    Action.CANCEL: ("scancel",),
    Action.SAVE: ("scancel", "--batch", "--signal=USR1"),
    # `uhold`, because the job's owner cannot undo a `hold` by an operator.
    Action.HOLD: ("scontrol", "uhold"),
    Action.RELEASE: ("scontrol", "release"),
}
# The job in a message of scancel or scontrol about one of many.
_ABOUT_JOB = re.compile(r"\bjob(?: id|id)? (\d+(?:_\d+)?)\b")
# Jobs per command, so that it is answered in time and its arguments are not too long.
_AT_ONCE = 250
_NOT_ALLOWED = ("Access/permission denied", "Invalid user id")


def act(action: Action, job_ids: Sequence[str], run: Run, ask: Ask) -> dict[str, UserError]:
    """Act on jobs, a few hundred at a time; return the errors by job."""
    errors: dict[str, UserError] = {}
    for begin in range(0, len(job_ids), _AT_ONCE):
        part = job_ids[begin : begin + _AT_ONCE]
        try:
            known = ask(part)
        except Unreachable as error:
            errors |= dict.fromkeys(part, error)
        else:
            errors |= _act_at_once(action, {job_id: known[job_id] for job_id in part}, run, ask)
    return errors


def _act_at_once(action: Action, known: Known, run: Run, ask: Ask | None) -> dict[str, UserError]:
    """Act with one command; then, if `ask` is given, singly on jobs that it left without a complaint."""
    errors: dict[str, UserError] = {}
    ids_of: dict[str, list[str]] = {}
    for job_id, records in known.items():
        try:
            ids_of[job_id] = _ids_to_act_on(action, job_id, records)
        except UserError as error:
            errors[job_id] = error
    if not ids_of:
        return errors
    left: Known = {}
    try:
        answer = run([*_COMMANDS[action], *(name for ids in ids_of.values() for name in ids)])
        if answer.code == 0:
            return errors
        complaints = _complaints(answer, ids_of)
        if ask is None or (action is Action.SAVE and not complaints and answer.stderr.strip()):
            complaints = dict.fromkeys(ids_of, answer.stderr)
        # No script gets the signal twice: a job without a complaint got it, or is over.
        elif action is not Action.SAVE:
            left = ask([job_id for job_id in ids_of if job_id not in complaints])
    except Unreachable as error:
        return errors | dict.fromkeys(ids_of, error)
    errors |= {job_id: _refusal(action, job_id, text, known[job_id]) for job_id, text in complaints.items()}
    for job_id, records in left.items():
        # A job that was held before may be held now without this command.
        was_held = action is Action.HOLD and not any(_is_to_do(action, record) for record in known[job_id])
        if was_held or any(_is_to_do(action, record) for record in records):
            errors |= _act_at_once(action, {job_id: records}, run, None)
    return errors


def _ids_to_act_on(action: Action, job_id: str, known: Sequence[Record]) -> list[str]:
    """Return the ids of a job or its tasks for the command; raise UserError if it would have no effect."""
    living = [record for record in known if record.state.is_live or record.state is State.UNKNOWN]
    words = ", ".join(dict.fromkeys(record.word for record in known))
    if not known:
        raise UserError(f"Slurm's queue does not have job {job_id}: it is over, or never was")
    if not living:
        raise UserError(f"job {job_id} is over already: {words}")
    if action is Action.CANCEL:
        return [job_id]
    if action is Action.SAVE:
        # By the raw id: to signal an array, scancel waits for minutes on the tasks that have not begun.
        if running := [record.raw_id for record in living if record.state is State.RUNNING]:
            return running
        message = f"job {job_id} is {known[0].state.value}: no running task can save a checkpoint"
        raise UserError(message, hint="to end it all the same: slipway cancel RUN")
    meant = [record for record in living if _is_to_do(action, record)]
    if not meant and action is Action.RELEASE:
        raise NotHeld(f"job {job_id} is not held: it is {words}")
    # A job that is held already is held again.
    meant = meant or [record for record in living if record.state is State.PENDING]
    if not meant:
        message = f"job {job_id} has begun: only a job that waits can be held"
        raise UserError(message, hint="to end it: slipway cancel RUN")
    return [_format_for_scontrol(record) for record in meant]


def _is_to_do(action: Action, record: Record) -> bool:
    if action is Action.CANCEL:  # the queue shows the effect of scancel at once
        return record.state.is_live and record.state is not State.COMPLETING
    if action is Action.HOLD:
        return record.state is State.PENDING and not is_held(record)
    return is_held(record)


def _complaints(answer: Answer, ids_of: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the messages of scancel or scontrol by the jobs that they name."""
    lines = {match[1]: line for line in answer.stderr.splitlines() if (match := _ABOUT_JOB.search(line))}
    named = {job_id: lines.keys() & {job_id, *ids} for job_id, ids in ids_of.items()}
    return {
        job_id: "\n".join(lines[name] for name in sorted(names)) for job_id, names in named.items() if names
    }


def is_held(record: Record) -> bool:
    """Return True if a job waits for its release."""
    if record.state is not State.PENDING:
        return False
    return "held" in (record.reason or "").lower() or record.word in HELD_STATES


def _format_for_scontrol(record: Record) -> str:
    """Return the id of waiting tasks for scontrol, which refuses squeue's suffix ``%1``."""
    head, percent, _ = record.job_id.partition("%")
    return f"{head}]" if percent else record.job_id


def _refusal(action: Action, job_id: str, stderr: str, known: Sequence[Record]) -> UserError:
    message = error_text(stderr)
    # Tasks that wait together may have several reasons.
    by_admin = action is Action.RELEASE and any("JobHeldAdmin" in (record.reason or "") for record in known)
    hint = "an administrator held it" if by_admin else None
    if any(words in message for words in _NOT_ALLOWED):
        owner = known[0].user
        hint = hint or f"the job is {owner}'s: {owner} can, or an administrator"
    return UserError(f"job {job_id} was not {action.value}: {message}", hint=hint)
