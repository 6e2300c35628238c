"""The stages around a training: the chain that a stage waits for, and the stages that wait for the training.

The last link of a chain is unknown beforehand. A stage after a chain therefore waits for the links that
exist (``--dependency=afterany``), and each link adds the one that it submits. When the stage begins, it looks
at the chain's marks, and leaves where the work is not done. So it runs after the success of the chain alone,
even if a link was killed at any moment: Slurm itself starts it, and the marks decide.

A stage that is to look at each n-th checkpoint (`Repeated`) is submitted again and again while the training
goes on: its own script, as a further job of its launch, one at a time. Its first job, which comes after the
training, waits for them.

The launcher writes `NAME` into the launch directories of all.
"""

import contextlib
import json
import os
import re
import sys
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    get_type_hints,
)

from slipway.common.files import AnyPath, read_json, write_atomic
from slipway.common.node import checkpoints, marks
from slipway.common.node.checkpoints import Progress
from slipway.common.node.marks import quote
from slipway.common.node.settings import SLURM, decode_file_names
from slipway.supervisor.hooks import Hook
from slipway.supervisor.job import Job, Leave

if TYPE_CHECKING:
    from slipway.supervisor.slurm import QueuedJob, Slurm

NAME = "stages.json"
# In the marks of a stage that is repeated: the checkpoints that were counted.
COUNTS_FILE = "checkpoints.json"
_COUNT_BYTES = 1 << 16
# Seconds between counts of checkpoints, between reports of new links to the stages after a chain, and that
# Slurm may take.
_COUNT_SECONDS, _TELL_SECONDS, _LOOK_BUDGET = 20.0, 60.0, 240.0
# Seconds after the launch was written in which a stage may still be submitted, as Slurm may answer slowly,
# and the longest pause between two looks for it.
_LATE_SECONDS, _LONGEST_PAUSE = 120, 8


class Stage(NamedTuple):
    """Another stage of the same command, with the launch that it is.

    Attributes
    ----------
    run, directory, tag
        Name of its run, its launch directory, and the launch's tag.
    dependency
        Its other dependencies than the chain, as sbatch takes them.
    needs_success
        It is for a chain whose work is done; otherwise for any that is over.
    """

    run: str
    directory: str
    tag: str
    dependency: str = ""
    needs_success: bool = True


class Repeated(NamedTuple):
    """A stage that looks at each n-th checkpoint of a training while that goes on.

    Attributes
    ----------
    run, directory, tag, script
        Name of its run, its launch directory, the launch's tag, and the path of its script.
    every
        Number of new complete checkpoints after which it is submitted.
    """

    run: str
    directory: str
    tag: str
    script: str
    every: int


class Stages(NamedTuple):
    """The chain that a launch waits for, and the stages that follow this launch."""

    before: Optional[Stage] = None
    after: Tuple[Stage, ...] = ()
    repeated: Tuple[Repeated, ...] = ()


def to_json(stages: Stages) -> str:
    """Return the text of ``stages.json``."""
    content = {
        "before": stages.before and stages.before._asdict(),
        "after": [stage._asdict() for stage in stages.after],
        "repeated": [stage._asdict() for stage in stages.repeated],
    }
    return json.dumps(content, indent=2) + "\n"


def read_stages(launch_dir: AnyPath) -> Stages:
    """Read the stages around a launch; most launches have none.

    Raises
    ------
    ValueError
        If the file is damaged, or of another version.
    OSError
        If it cannot be read.
    """
    try:
        content = decode_file_names(read_json(os.path.join(launch_dir, NAME)))
    except FileNotFoundError:
        return Stages()
    try:
        before: Optional[Dict[str, Any]] = content.get("before")
        return Stages(
            _check_types(Stage(**before)) if before else None,
            tuple(_check_types(Stage(**stage)) for stage in content.get("after", ())),
            tuple(_check_types(Repeated(**stage)) for stage in content.get("repeated", ())),
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is damaged, or of another version: {error}") from error


def _check_types(stage: Any) -> Any:
    """Return a stage; raise TypeError if a field of it is of another type, or no number from 1 on."""
    for name, kind in get_type_hints(type(stage)).items():
        value = getattr(stage, name)
        if not isinstance(value, kind) or (kind is int and value < 1):
            raise TypeError(f"{name} is " + quote(repr(value)))
    return stage


def waits_for(jobs: Sequence[str], own: str = "") -> str:
    """Return the dependency of a stage on the end of all these jobs and its own dependency."""
    return ",".join(["afterany:" + ":".join(jobs), *([own] if own else [])])


class DependentStages:
    """The stages around the chain that this job is a link of."""

    def __init__(self, job: Job, slurm: "Slurm") -> None:
        self._job, self._slurm = job, slurm
        self._stages = Stages()
        # By a stage's tag the jobs that it waits for, as far as this job knows.
        self._waited_jobs: Dict[str, List[str]] = {}
        if job.by_hand or job.settings.scheduler != SLURM:
            return
        try:
            self._stages = read_stages(job.directory)
        except (OSError, ValueError) as error:
            job.say(f"the stages before and after it are not known: {error}", sys.stderr)

    def hooks(self, tell: Callable[[], None], newest: Callable[[], Optional[Progress]]) -> List[Hook]:
        """Return the hooks that update stages with links, and submit stages after checkpoints."""
        if not self._stages.after and not self._stages.repeated:
            return []

        def look(job: Job) -> Dict[str, List[str]]:
            tell()
            if self._stages.repeated:
                self.repeat(newest())
            return self._waited_jobs

        def take(job: Job, waited_jobs: Dict[str, List[str]]) -> None:
            self._waited_jobs.update(waited_jobs)

        every = _COUNT_SECONDS if self._stages.repeated else _TELL_SECONDS
        return [Hook("the stages that follow", look, take, _LOOK_BUDGET, every)]

    def require_done(self) -> None:
        """Leave where the chain before this stage is not done.

        Raises
        ------
        Leave
            With the reason, which a mark has too.
        """
        before = self._stages.before
        if before is None or not before.needs_success or self._job.link > 1:
            return
        attempts = marks.read_attempts(before.directory, tags=(before.tag,))
        if any(_is_done(attempt) for attempt in attempts):
            return
        end = marks.chain_end(before.directory)
        why = f"{before.run}, which it waited for, is not done"
        if end is not None:
            why += f": {end.sentence}"
        elif attempts and attempts[-1].why:
            why += f": {quote(attempts[-1].why)}"
        fields = {"exit_code": 1, "ended": int(time.time()), "verdict": "stop", "why": why}
        self._job.leave(marks.ENDED, fields)
        raise Leave(f"leaves without doing anything: {why}", 1)

    # --- stages after the chain ---

    def wait_for(self, jobs: Sequence[str]) -> None:
        """Let the stages after the chain wait for these jobs too; known ones are left out."""
        for stage in self._stages.after:
            if self._waited_jobs.get(stage.tag) == list(jobs):
                continue
            queued = self._slurm.queued_jobs(stage.tag) or {}
            first = queued.pop(1, None)
            if first is None or not first.waits:  # not submitted yet, or it has begun, or was cancelled
                continue
            dependency = waits_for([*jobs, *_ids(queued)], stage.dependency)
            if self._slurm.update_dependency(first.job_id, dependency):
                self._waited_jobs[stage.tag] = list(jobs)
            else:
                self._job.say(f"job {first.job_id}, {stage.run}, could not be made to wait for {dependency}")

    def wait_until_submitted(self) -> None:
        """Wait for the launcher to submit the stages after the chain, as it does after the first link.

        A link may fail before that, and a stage that is submitted then would wait for no later link.
        """
        if not self._stages.after:
            return
        try:
            age = time.time() - os.path.getmtime(os.path.join(self._job.directory, NAME))
        except OSError:  # the launch was deleted
            return
        end, pause = time.monotonic() + _LATE_SECONDS - max(age, 0), 0
        while time.monotonic() < end:
            late = [stage.run for stage in self._stages.after if not self._is_submitted(stage)]
            if not late:
                return
            if not pause:
                self._job.say("waits for the submission of " + ", ".join(late))
            pause = min(2 * pause or 1, _LONGEST_PAUSE)
            time.sleep(pause)

    def _is_submitted(self, stage: Stage) -> bool:
        """Return True for a stage that is in the queue, or that its launcher has given up."""
        return marks.claimant(stage.directory) is not None or 1 in (self._slurm.queued_jobs(stage.tag) or {})

    def cancel(self, why: str) -> None:
        """Cancel the stages that need the success of this chain, which there will not be."""
        for stage in self._stages.after:
            queued = (self._slurm.queued_jobs(stage.tag) or {}) if stage.needs_success else {}
            first = queued.get(1)
            if first is None or not first.waits:
                continue
            if self._slurm.cancel([first.job_id]):
                by = quote(f"job {self._job.claimant}: {why}")
                marks.note_cancelled(stage.directory, first.job_id, by)
                self._job.say(f"cancelled job {first.job_id}, {stage.run}, which waited for this chain")
            else:
                self._job.say(f"job {first.job_id}, {stage.run}, leaves by itself when it begins")

    # --- stages for each n-th checkpoint ---

    def wait_for_repeated(self) -> None:
        """Let the job after the training wait for all others of its stage.

        A look that was interrupted may have submitted one without a record.
        """
        for stage in self._stages.repeated:
            queued = self._slurm.queued_jobs(stage.tag) or {}
            first = queued.pop(1, None)
            if first is not None and first.waits:
                known = re.findall(r"[0-9]+", first.dependency)
                self._wait_also(stage, first, [job_id for job_id in _ids(queued) if job_id not in known])

    def begin_counting(self, newest: Optional[Progress]) -> None:
        """Note the newest checkpoint of a training that begins: earlier ones are not counted."""
        for stage in self._stages.repeated:
            if not os.path.lexists(_counts_path(stage)):
                self._note(stage, _Count(newest))

    def repeat(self, newest: Optional[Progress]) -> None:
        """Submit the stages that have enough new checkpoints to look at; a failure holds up nothing."""
        for stage in self._stages.repeated:
            before = _read_count(stage)
            count = before.count_newer(newest, self._job.settings.engine)
            if count.new >= stage.every:
                problem = self._submit(stage)
                count = count._replace(new=count.new if problem else 0, problem=problem)
                if problem and problem != before.problem:
                    self._job.say(f"warning: {stage.run} was not submitted after a checkpoint: {problem}")
            if count != before:
                self._note(stage, count)

    def _submit(self, stage: Repeated) -> str:
        """Submit a further job of a stage, unless one waits already; return the error, or ``""``."""
        from slipway.supervisor.slurm import submitted_id

        queued = self._slurm.queued_jobs(stage.tag)
        if queued is None:
            return "squeue does not answer"
        first = queued.pop(1, None)
        if first is None or not first.waits:
            return "its job after the training is not in the queue"  # as of a user who has cancelled it
        if any(job.waits for job in queued.values()):
            return ""  # it looks at all checkpoints that there are when it begins
        link = max([1, *queued, *marks.later_jobs(stage.directory, (stage.tag,))]) + 1
        # In place of the header's: a singleton would wait for the job after the training. This one runs.
        after = ["after:" + self._slurm.job_id, *(["afterany:" + ":".join(_ids(queued))] if queued else [])]
        flags = ["--dependency=" + ",".join(after), "--kill-on-invalid-dep=yes", "--begin=now"]
        script = name_script(stage.script, stage.tag, link)
        answer = self._slurm.submit(script, [str(link), stage.tag], flags)
        job_id = submitted_id(answer)
        if job_id is None:
            lost = (self._slurm.queued_jobs(stage.tag) or {}).get(link)
            if lost is None:
                return quote(answer.last_line)
            job_id = lost.job_id
        marks.claim(stage.directory, job_id, link)
        self._job.say(f"{stage.run} looks at the new checkpoints as job {job_id}")
        self._wait_also(stage, first, [job_id])
        return ""

    def _wait_also(self, stage: Repeated, first: "QueuedJob", jobs: Sequence[str]) -> None:
        """Let a stage's job after the training wait for these jobs too."""
        if not jobs:
            return
        own = [first.dependency] if first.dependency else []
        if not self._slurm.update_dependency(first.job_id, ",".join([*own, waits_for(jobs)])):
            waits = ", ".join(jobs)
            self._job.say(f"job {first.job_id}, {stage.run}, could not be made to wait for job {waits}")

    def _note(self, stage: Repeated, count: "_Count") -> None:
        try:
            marks.make_directory(stage.directory)
            write_atomic(_counts_path(stage), count.to_json())
        except OSError as error:
            self._job.say(f"{_counts_path(stage)} could not be written: {error}")


def name_script(script: str, tag: str, link: int) -> str:
    """Return the name under which a link's script is submitted, which identifies its job in Slurm."""
    directory, name = os.path.split(script)
    named = os.path.join(directory, "submitted", f"{tag}.{link}_submission.sh")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(named))  # fails if the launch directory was deleted
        os.symlink(os.path.join("..", name), named)
    except FileExistsError:
        pass
    except OSError:  # no links on this file system
        import shutil  # late: it takes long

        try:
            shutil.copyfile(script, named)
        except OSError:  # no room
            return script
    return named


class _Count(NamedTuple):
    """The newest checkpoint that was counted, the number since the last submission, and what went wrong."""

    newest: Optional[Progress] = None
    new: int = 0
    problem: str = ""

    def count_newer(self, newest: Optional[Progress], engine: str) -> "_Count":
        """Count the checkpoints up to a newer one: our trainer numbers them, of others each look sees one."""
        if newest is None or not checkpoints.is_newer(newest, self.newest):
            return self
        before = self.newest.order if self.newest else 0
        further = newest.order - before if engine == "megatron" else 1
        return self._replace(newest=newest, new=self.new + max(1, further))

    def to_json(self) -> str:
        fields: Dict[str, Any] = self.newest.fields() if self.newest else {}
        return json.dumps(dict(fields, new=self.new, problem=self.problem)) + "\n"


def _is_done(attempt: marks.JobAttempt) -> bool:
    """Return True for a link that did all, also if it was killed before it could say so (`Link.end`)."""
    return attempt.verdict == "done" or (attempt.verdict is None and attempt.exit_code == 0)


def _read_count(stage: Repeated) -> _Count:
    try:
        content = read_json(_counts_path(stage), _COUNT_BYTES)
        return _Count(
            checkpoints.from_fields(content), int(content.get("new", 0)), str(content.get("problem", ""))
        )
    except (OSError, ValueError, TypeError):
        return _Count()


def _counts_path(stage: Repeated) -> str:
    return os.path.join(stage.directory, marks.MARKS, COUNTS_FILE)


def _ids(queued: Dict[int, "QueuedJob"]) -> List[str]:
    return [queued[link].job_id for link in sorted(queued)]
