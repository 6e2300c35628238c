"""Slurm's commands as a job calls them: each with a time-out, and without exceptions.

Questions have ``--all``: without it Slurm shows users nothing of a hidden partition; and ``--local``, which
saves a call about federations. Where a site limits a user's calls (rl_enable), commands sleep until the next
is due, for a minute under the tightest limit known: the time limits here are longer.

If Slurm does not answer, the result is ``None`` or an empty text: the training goes on without.
"""

import os
import re
import signal
import subprocess
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional, Sequence

from slipway.common.files import append_line, to_printable
from slipway.common.node.settings import SUBMISSION_LOG
from slipway.common.node.slurm_states import plain_word
from slipway.supervisor.job import Job

_QUESTION_SECONDS = 75
_ACTION_SECONDS = 75
_SUBMISSION_SECONDS = 120
# A signal to the whole job may end a question before it is answered.
_ATTEMPTS = 3
# A signal of Slurm's to the job must not end a command half done.
_DEFERRED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Variables of a user that change what Slurm's commands print or do.
_CHANGE_ANSWERS = (
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCONTROL_",
    "SCANCEL_",
    "SLURM_TIME_FORMAT",
    "SLURM_BITSTR_LEN",
)
# Slurm's own for this job, and what would change how the next one is submitted.
_OF_THIS_JOB = ("SLURM_", "SLURMD_", "SBATCH_")
# Slurm sets them for a job that was given GPUs; otherwise they are the user's.
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")

_FIELD = r"(?:^| )(JobState|Reason|PreemptTime|Requeue|Restarts|TimeLimit|EndTime)=([^ ]*)"
_DURATION = r"(?:([0-9]{1,5})-)?([0-9]{2}):([0-9]{2}):([0-9]{2})$"
_STATE = r" JobState=[^ ]*(?= Reason=)"
_SUBMITTED_ID = r"([0-9]+)(?:;.*)?"
_SUBMITTED_LINK = r"\.([0-9]{1,6})_submission\.sh"
_DOWN = r"down|fail|error|unk|.*\*$"


class JobRecord(NamedTuple):
    """The words of ``scontrol show job`` for a job.

    Attributes
    ----------
    state, reason
        ``JobState`` and ``Reason``: while the script of a job lives that Slurm ends, COMPLETING and why.
    preempted
        ``PreemptTime``: Unix time, or ``None`` as a text.
    requeue
        Slurm may put the job back into the queue.
    restarts
        Number of times that it did.
    time_limit, end
        The limit in seconds, and the Unix time of its end; 0 if unlimited or not known.
    """

    state: str
    reason: str = ""
    preempted: str = ""
    requeue: bool = False
    restarts: int = 0
    time_limit: int = 0
    end: int = 0


class QueuedJob(NamedTuple):
    """A job in the queue: Slurm's word for its state, and its remaining dependency, as sbatch takes it."""

    job_id: str
    state: str
    dependency: str = ""

    @property
    def waits(self) -> bool:
        return self.state == "PENDING"


class Answer(NamedTuple):
    """Exit code and output of a command; the code is ``None`` where it gave no answer in time."""

    code: Optional[int]
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        lines = (self.output + "\n" + self.errors).strip().splitlines()
        return lines[-1].strip() if lines else ""


class Slurm:
    """Slurm's commands, called from a job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def job_id(self) -> str:
        """Id by which Slurm knows this job: of an array's task ``17_2``; empty outside of Slurm."""
        variables = self._job.environment
        array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
        job_id = array or variables.get("SLURM_JOB_ID", "")
        return f"{job_id}_{task}" if job_id and task else job_id

    # --- questions ---

    def show_job(self, job_id: str) -> Optional[JobRecord]:
        """Return the controller's record of a job; ``None`` if it has none or does not answer."""
        answer = self._ask(["scontrol", "--all", "--local", "show", "job", "--oneliner", job_id])
        fields: Dict[str, str] = {}
        record = answer.output
        if len(re.findall(_STATE, record)) > 1:  # the job's name, which precedes them, may look like fields
            job_name = self._squeue("--states=all", "--format=%j", "--jobs=" + job_id)
            if job_name.code == 0:
                record = record.partition(f" JobName={job_name.output.rstrip()} ")[2]
        state = re.search(_STATE, record)
        for name, value in re.findall(_FIELD, record[state.start() :] if state else ""):
            fields.setdefault(name, value)  # a comment of the user's may look like a field
        if answer.code != 0 or "JobState" not in fields:
            return None
        limit = re.match(_DURATION, fields.get("TimeLimit", ""))
        days, hours, minutes, seconds = (int(part or 0) for part in limit.groups()) if limit else (0, 0, 0, 0)
        return JobRecord(
            state=fields["JobState"],
            reason=fields.get("Reason", ""),
            preempted=fields.get("PreemptTime", ""),
            requeue=fields.get("Requeue") == "1",
            restarts=_number(fields.get("Restarts", "")),
            time_limit=((days * 24 + hours) * 60 + minutes) * 60 + seconds,
            end=_number(fields.get("EndTime", "")),
        )

    def state_of(self, job_id: str) -> str:
        """Return Slurm's word for a job that has ended; empty if it is not known."""
        record = self.show_job(job_id)
        state = plain_word(record.state) if record else ""
        if state in ("", "COMPLETING"):  # the controller forgets after a few minutes
            command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State"]
            lines = self._ask([*command, "--jobs=" + job_id]).output.strip().splitlines()
            state = plain_word(lines[-1]) if lines else ""
        return state

    def squeue_state(self, job_id: str) -> str:
        """Return the state of a job as squeue knows it; empty where it does not answer."""
        answer = self._squeue("--states=all", "--format=%T", "--jobs=" + job_id)
        return answer.output.strip() if answer.code == 0 else ""

    def down_nodes(self, hosts: Sequence[str]) -> List[str]:
        """Return those of the hosts that Slurm takes for dead or cannot reach."""
        if not hosts:
            return []
        command = ["sinfo", "--all", "--noheader", "--Node", "--format=%N %T", "--nodes=" + ",".join(hosts)]
        words = (line.split() for line in self._ask(command).output.splitlines())
        down = {fields[0] for fields in words if len(fields) == 2 and re.match(_DOWN, fields[1])}
        return [host for host in hosts if host in down]

    def known_nodes(self, names: Sequence[str]) -> List[str]:
        """Return those of the names that are nodes of this cluster; all where it does not answer."""
        command = ["sinfo", "--all", "--noheader", "--Node", "--format=%N", "--nodes=" + ",".join(names)]
        answer = self._ask(command)
        known = answer.output.split() if answer.code == 0 else names
        return [name for name in names if name in known]

    def find_submitted(self, link: int) -> Optional[str]:
        """Return the job of a link that the queue has, where the answer to its submission was lost.

        A squeue that fails may have shown it before: the link would be submitted twice.
        """
        job = _jobs_by_link(self._queue().output, self._job.settings.tag).get(link)
        return job.job_id if job else None

    def queued_jobs(self, tag: str) -> Optional[Dict[int, QueuedJob]]:
        """Return a launch's jobs in the queue, by their links; ``None`` where it does not answer."""
        answer = self._queue()
        return _jobs_by_link(answer.output, tag) if answer.code == 0 else None

    def _queue(self) -> Answer:
        return self._squeue(f"--user={os.getuid()}", "--format=%A|%T|%E|%o")

    def test_only(self, exclude: str) -> Answer:
        """Ask whether this launch's script could start without some nodes; code 0 is yes."""
        settings = self._job.settings
        command = ["sbatch", "--test-only", "--exclude=" + exclude, settings.script, settings.tag]
        return self._run(command, _QUESTION_SECONDS, as_submitted=True)

    def find_steps(self, name: str = "") -> Optional[List[str]]:
        """Return the job's steps of a name, or all but the script's; ``None`` where Slurm does not answer."""
        answer = self._squeue("--steps", "--format=%i %j", "--jobs=" + self.job_id)
        steps = [line.partition(" ") for line in map(str.strip, answer.output.splitlines())]
        numbered = [step for step, _, other in steps if re.search(r"\.[0-9]+$", step) and name in ("", other)]
        return numbered if answer.code == 0 else None

    def find_tasks_step(self) -> Optional[int]:
        """Return the number of the tasks' step, before those that they start; ``None`` if it is not known."""
        steps = self.find_tasks_steps()
        return min((int(step.rpartition(".")[2]) for step in steps or ()), default=None)

    def find_tasks_steps(self) -> Optional[List[str]]:
        """Return the steps with the name of the tasks' own; ``None`` where Slurm does not answer."""
        # In an allocation the script has changed the name: that of the job is every step's of its user.
        return self.find_steps(os.environ.get("SLURM_JOB_NAME", ""))

    # --- actions ---

    def submit(self, script: str, arguments: Sequence[str], flags: Sequence[str]) -> Answer:
        """Submit a script in the environment in which this job was submitted; see `submitted_id`.

        A site filter's messages about an accepted job go to the file that the launcher keeps for them.
        """
        command = ["sbatch", "--parsable", *flags, script, *arguments]
        answer = self._run(command, _SUBMISSION_SECONDS, as_submitted=True)
        job_id = submitted_id(answer)
        for line in answer.errors.splitlines() if job_id else ():
            notice = f"job {job_id}: {to_printable(re.sub('^sbatch: (error: )?', '', line.strip()))}"
            self._job.say(f"sbatch says of {notice}")
            with suppress(OSError):
                append_line(os.path.join(self._job.directory, SUBMISSION_LOG), notice)
        return answer

    def cancel(self, job_ids: Sequence[str]) -> bool:
        """Cancel jobs, all at once: a Slurm that does not answer is waited for once."""
        return self._run(["scancel", *job_ids], _ACTION_SECONDS).code == 0

    def hold(self, job_ids: Sequence[str]) -> bool:
        """Hold jobs that wait, so that their owner can release them."""
        return self._run(["scontrol", "uhold", ",".join(job_ids)], _ACTION_SECONDS).code == 0

    def update_excluded(self, job_ids: Sequence[str], nodes: str) -> bool:
        """Keep jobs that wait off some nodes, in place of those that they were kept off before."""
        command = ["scontrol", "update", "JobId=" + ",".join(job_ids), "ExcNodeList=" + nodes]
        return self._run(command, _ACTION_SECONDS).code == 0

    def update_dependency(self, job_id: str, dependency: str) -> bool:
        """Let a waiting job wait for others, in place of those that it waited for before."""
        command = ["scontrol", "update", "JobId=" + job_id, "Dependency=" + dependency]
        return self._run(command, _ACTION_SECONDS).code == 0

    def kill_steps(self) -> None:
        """Kill the job's tasks on all nodes: at the job's own end they would get a signal, and save."""
        self.kill(self.find_steps() or [])

    def kill(self, steps: Sequence[str]) -> None:
        """Kill the tasks of steps."""
        if steps:
            self._run(["scancel", "--signal=KILL", *steps], _ACTION_SECONDS)

    # --- how ---

    def _squeue(self, *options: str) -> Answer:
        return self._ask(["squeue", "--all", "--local", "--noheader", *options])

    def _ask(self, command: Sequence[str]) -> Answer:
        answer = Answer(None, "", "")
        for _ in range(_ATTEMPTS):
            answer = self._run(command, _QUESTION_SECONDS)
            if answer.code is None or answer.code >= 0:  # a negative one is a signal
                break
        return answer

    def _run(self, command: Sequence[str], seconds: float, as_submitted: bool = False) -> Answer:
        environment = self._submitted_environment() if as_submitted else self._environment()
        return run_limited(command, seconds, environment, self._submit_dir() if as_submitted else None)

    def _environment(self) -> Dict[str, str]:
        """Return the environment of a question: the job's own, without the script's exports for the tasks."""
        environment = self._job.environment
        kept = {name: value for name, value in environment.items() if not name.startswith(_CHANGE_ANSWERS)}
        return dict(kept, SLURM_TIME_FORMAT="%s")  # Unix time

    def _submitted_environment(self) -> Dict[str, str]:
        """Return the environment in which this job was submitted, without what Slurm set for it."""
        environment = self._job.environment
        has_gpus = bool(environment.get("SLURM_JOB_GPUS"))
        submitted = {
            name: value
            for name, value in environment.items()
            if not name.startswith(_OF_THIS_JOB) and not (has_gpus and name in _GPU_VARIABLES)
        }
        if environment.get("SLURM_CONF"):
            submitted["SLURM_CONF"] = environment["SLURM_CONF"]
        return submitted

    def _submit_dir(self) -> Optional[str]:
        directory = self._job.environment.get("SLURM_SUBMIT_DIR")
        return directory if directory and os.access(directory, os.X_OK) else None


def run_limited(
    command: Sequence[str],
    seconds: float,
    environment: Optional[Dict[str, str]] = None,
    directory: Optional[str] = None,
) -> Answer:
    """Run a command that is killed after some seconds, with all that it started; return its answer."""
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)  # the command inherits it
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Answer(None, "", f"{command[0]}: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Answer(None, "", f"{command[0]}: no answer within {seconds} seconds")
    return Answer(process.returncode, *(text.decode("utf-8", "replace") for text in (output, errors)))


def _number(text: str) -> int:
    return int(text) if re.match("[0-9]{1,12}$", text) else 0


def _jobs_by_link(output: str, tag: str) -> Dict[int, QueuedJob]:
    """Return the jobs of a launch among those that squeue shows, by their links.

    Slurm shows a job's path in every version, its arguments only before 23.02: the path has the tag.
    """
    pattern = "/submitted/" + re.escape(tag) + _SUBMITTED_LINK
    jobs: Dict[int, QueuedJob] = {}
    for line in output.splitlines():
        job_id, _, rest = line.strip().partition("|")
        match = re.search(pattern, rest)
        if match and job_id.isdigit():
            state, dependency = rest.split("|")[:2]
            waits_for = re.sub(r"\([^)]*\)|\(null\)", "", dependency)
            jobs.setdefault(int(match.group(1)), QueuedJob(job_id, plain_word(state), waits_for))
    return jobs


def submitted_id(answer: Answer) -> Optional[str]:
    """Return the id of the job that ``sbatch --parsable`` submitted; ``None`` where it says no id."""
    for line in reversed(answer.output.splitlines()):
        match = re.match(_SUBMITTED_ID, line.strip())
        if match and match.end() == len(line.strip()):
            return match.group(1)
    return None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its children, which may hold its output open."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired, OSError, ValueError):
        process.communicate(timeout=5)
