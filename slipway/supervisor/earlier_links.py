"""The links before one that begins: how they ended, by their marks or by Slurm."""

from typing import Any, Dict, Optional, Tuple

from slipway.common.node import checkpoints, marks
from slipway.common.node.marks import JobAttempt
from slipway.common.node.settings import SLURM
from slipway.common.node.slurm_states import LIVE, STATES
from slipway.supervisor.chain import Before, Ending
from slipway.supervisor.job import Job
from slipway.supervisor.judgement import facts_of_end, fields_of, judge_end
from slipway.supervisor.slurm import JobRecord, Slurm


class EarlierLinks:
    """The links before this one."""

    def __init__(self, job: Job, slurm: Slurm) -> None:
        self._job, self._slurm, self._settings = job, slurm, job.settings
        # The last attempt of the link before, and its end as found out, if it left no mark of that.
        self._judged: Tuple[Optional[JobAttempt], Dict[str, Any]] = (None, {})

    def find_running(self) -> str:
        """Return the job of an earlier link that Slurm has not ended yet, and Slurm's word for it.

        A link begins before that where its dependency was lost, as by ``scontrol update dependency=``.
        """
        if self._job.link == 1 or self._settings.chain.links == 1:
            return ""
        queued = self._slurm.queued_jobs(self._settings.tag) or {}
        # One that waits may wait for this one: it was requeued.
        earlier = [queued[link] for link in queued if link < self._job.link and not queued[link].waits]
        return f"{earlier[0].job_id}, which is {earlier[0].state}" if earlier else ""

    def look(self, began_with: Optional[checkpoints.Progress]) -> Before:
        """Return the facts about the links before, for a link that begins with a checkpoint."""
        directory, tags = self._job.directory, (self._settings.tag,)
        jobs: Dict[int, Optional[str]] = {1: marks.job_of(directory)}
        jobs.update(marks.later_jobs(directory, tags))
        attempts: Dict[int, JobAttempt] = {}
        for attempt in marks.read_attempts(directory, tags=tags, each_start=True):
            # Not one of a script that was submitted by hand; of a job with several starts the last.
            if attempt.link < self._job.link and jobs.get(attempt.link) in (None, attempt.job_id):
                attempts[attempt.link] = attempt
        last = self._job.link - 1
        marked = max(attempts, default=0)
        failures = attempts[marked].failures if marked else 0
        began_before = checkpoints.from_fields(attempts[marked]._asdict()) if marked else None
        newest = attempts.get(last)
        job_id = jobs.get(last) or (newest.job_id if newest else "")
        state = self._slurm.state_of(job_id) if job_id and self._settings.scheduler == SLURM else ""
        is_judged_now = False
        if newest and newest.verdict:
            ending = Ending(newest.verdict, newest.rule or "unknown", newest.why or "", ())
        elif job_id and STATES.get(state) not in LIVE:
            is_judged_now = True
            ending = self._judge(job_id, newest, state)
        else:
            ending = Ending()
        has_progressed = checkpoints.is_newer(began_with, began_before)
        return Before(
            job_id, ending, is_judged_now, state, failures, last - marked + bool(marked), has_progressed
        )

    def leave_mark(self, job_id: str, ending: Ending) -> None:
        """Leave the mark that the link before could not leave."""
        attempt, judged_fields = self._judged
        self._job.say(f"the link before, job {job_id}, left no word: {ending.why}")
        if attempt is None or attempt.verdict:
            return
        fields = dict(judged_fields, link=attempt.link, judged_by=f"job {self._job.claimant}")
        # Killed while it judged itself, it has left the first half of its mark.
        fields.update(exit_code=attempt.exit_code, ended=attempt.ended, signal=attempt.signal)
        fields.update(fields_of(ending))
        is_first = not attempt.is_over
        marks.leave(self._job.directory, attempt.stem, marks.ENDED, self._settings.tag, fields, once=is_first)

    def _judge(self, job_id: str, attempt: Optional[JobAttempt], state: str) -> Ending:
        hosts = attempt.nodes.split(",") if attempt and attempt.nodes else []
        facts = facts_of_end(
            self._job,
            job_id,
            attempt.exit_code if attempt else None,
            JobRecord(state) if state else None,
            attempt and attempt.signal,
        )
        since = int(attempt.started or 0) if attempt else 0
        judged_fields, ending = judge_end(self._job, self._slurm, job_id, facts, hosts, since)
        self._judged = (attempt, dict(judged_fields, state=state))
        return ending
