"""The stages around a chain: the chain that a stage waits for, and the stages that wait for one.

Nobody knows beforehand which link will be the last. A stage after a chain therefore waits for the links that
exist (``--dependency=afterany``), and each link adds the one that it submits. When the stage begins, it looks
at the chain's marks, and leaves where the work is not done. So it runs after the success of the chain alone,
whatever killed a link at whatever moment: Slurm itself starts it, and the marks judge.

The launcher writes `NAME` into the launch directories of both.
"""

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from supervisor import marks
from supervisor.files import AnyPath, plain, read_json
from supervisor.job import Job, Leave
from supervisor.settings import SLURM, of_file_system

if TYPE_CHECKING:
    from supervisor.slurm import Slurm

NAME = "stages.json"
# Of a mark, which others may write, in a log and in another mark.
_SAID = 1000


class Stage(NamedTuple):
    """Another stage of the same command, with the launch that it is.

    Attributes
    ----------
    run, directory, tag
        Name of its run, its launch directory, and the launch's tag.
    dependency
        Its own dependency beside the chain, as sbatch takes it.
    needs_success
        It is for a chain whose work is done; otherwise for any that is over.
    """

    run: str
    directory: str
    tag: str
    dependency: str = ""
    needs_success: bool = True


class Stages(NamedTuple):
    """The chain that a launch waits for, and the stages that wait for this launch's own chain."""

    before: Optional[Stage] = None
    after: Tuple[Stage, ...] = ()


def to_json(stages: Stages) -> str:
    """Return the text of ``stages.json``."""
    content = {
        "before": stages.before and stages.before._asdict(),
        "after": [stage._asdict() for stage in stages.after],
    }
    return json.dumps(content, indent=2) + "\n"


def read_stages(launch_dir: AnyPath) -> Stages:
    """Read the stages around a launch; most launches have none.

    Raises
    ------
    ValueError
        If the file is of another version.
    OSError
        If it cannot be read.
    """
    try:
        content = of_file_system(read_json(os.path.join(launch_dir, NAME)))
    except FileNotFoundError:
        return Stages()
    try:
        before: Optional[Dict[str, Any]] = content.get("before")
        return Stages(
            Stage(**before) if before else None, tuple(Stage(**each) for each in content.get("after", ()))
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is not of this version: {error}") from error


def waits_for(jobs: Sequence[str], own: str = "") -> str:
    """Return the dependency of a stage on the end of all these jobs, beside its own."""
    return ",".join(["afterany:" + ":".join(jobs), *([own] if own else [])])


class Following:
    """The stages around the chain that this job is a link of."""

    def __init__(self, job: Job, slurm: "Slurm") -> None:
        self._job, self._slurm = job, slurm
        self._stages = Stages()
        # By a stage's tag the jobs that it waits for, as far as this job knows.
        self._told: Dict[str, List[str]] = {}
        if job.by_hand or job.settings.scheduler != SLURM:
            return
        try:
            self._stages = read_stages(job.directory)
        except (OSError, ValueError) as error:
            job.say(f"the stages before and after it are not known: {error}", sys.stderr)

    @property
    def is_waited_for(self) -> bool:
        return bool(self._stages.after)

    def require_done(self) -> None:
        """Leave where the chain before this stage is not done.

        Raises
        ------
        Leave
            With the reason, which a mark has too.
        """
        before = self._stages.before
        if before is None or not before.needs_success:
            return
        lives = marks.read_attempts(before.directory, tags=(before.tag,))
        if any(life.verdict == "done" for life in lives):
            return
        end = marks.chain_end(before.directory)
        why = f"{before.run}, which it waited for, is not done"
        if end is not None:
            why += f": {plain(f'{end.by} ended the chain: {end.why}')[:_SAID]}"
        elif lives and lives[-1].why:
            why += f": {plain(lives[-1].why)[:_SAID]}"
        fields = {"exit_code": 1, "ended": int(time.time()), "verdict": "stop", "why": why}
        marks.leave(self._job.directory, self._job.life, marks.ENDED, self._job.settings.tag, fields)
        raise Leave(f"leaves without doing anything: {why}", 1)

    def wait_for(self, jobs: Sequence[str]) -> None:
        """Let the stages that follow wait for the end of these jobs too; what is known is not told again."""
        for stage in self._stages.after:
            if self._told.get(stage.tag) == list(jobs):
                continue
            waiting = self._slurm.find_waiting(stage.tag)
            if waiting is None:  # not submitted yet, or it has begun, or Slurm does not answer
                continue
            dependency = waits_for(jobs, stage.dependency)
            if self._slurm.update_dependency(waiting, dependency):
                self._told[stage.tag] = list(jobs)
            else:
                self._job.say(f"job {waiting}, {stage.run}, could not be told to wait for {dependency}")

    def cancel(self, why: str) -> None:
        """Cancel the stages that follow and need the success of this chain, which there will not be."""
        for stage in self._stages.after:
            waiting = self._slurm.find_waiting(stage.tag) if stage.needs_success else None
            if waiting is None:
                continue
            if self._slurm.cancel([waiting]):
                marks.note_cancelled(
                    stage.directory, waiting, f"job {self._job.claimant}: {plain(why)}"[:_SAID]
                )
                self._job.say(f"cancelled job {waiting}, {stage.run}, which waited for this chain")
            else:
                self._job.say(f"job {waiting}, {stage.run}, leaves by itself when it begins")
