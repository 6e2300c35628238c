"""A job as a link of its chain: it begins after the links before, and its end decides about those to come.

The decisions are in `slipway.supervisor.chain`; this carries them out. Nothing in it ends the job but
`Leave`.
"""

import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from slipway.common.node import checkpoints, marks
from slipway.common.node.settings import SLURM
from slipway.common.node.slurm_states import state_at_end
from slipway.supervisor.chain import Ending, Phase, Transition, decide_after_end, look_back
from slipway.supervisor.dependent_stages import DependentStages
from slipway.supervisor.earlier_links import EarlierLinks
from slipway.supervisor.hooks import Hook, Verdict
from slipway.supervisor.job import Job, Leave
from slipway.supervisor.judgement import facts_of_end, fields_of, judge_end
from slipway.supervisor.later_links import LaterLinks
from slipway.supervisor.slurm import Slurm


class Judged(NamedTuple):
    """The end of a job's tasks as it was judged: the fields of its mark, and what follows for the chain."""

    fields: Dict[str, Any]
    ending: Ending
    step: Transition


class Link:
    """One job of a chain; a launch without a chain is a chain of one link."""

    def __init__(self, job: Job, slurm: Slurm) -> None:
        self._job, self._slurm = job, slurm
        self._settings, self._chain = job.settings, job.settings.chain
        self.earlier, self.later = EarlierLinks(job, slurm), LaterLinks(job, slurm)
        self._dependents = DependentStages(job, slurm)
        self._failures = 0
        self._began_with: Optional[checkpoints.Progress] = None
        self._is_beginning_known = False

    def begin(self) -> None:
        """Look at what came before, and submit what comes next: so a node that dies does not end the chain.

        Raises
        ------
        Leave
            If the chain has ended, or that of the stage before is not done: the job has nothing to do.
        """
        job, before = self._job, None
        self._dependents.require_done()
        self._look_at_checkpoint()
        with job.best_effort("what came before is not known"):
            # A further job of a stage that is repeated continues nothing.
            is_further = job.link > 1 and self._chain.links > 1
            before = self.earlier.look(self._began_with) if is_further else None
        step = look_back(self._chain, job.link, before, self.later.next_job() is not None)
        self._failures = step.failures
        if before and step.ending:
            if before.is_judged_now:
                self.earlier.leave_mark(before.job, step.ending)
            why = f"job {before.job}: {step.ending.why}"
            if step.phase is Phase.OVER and step.ending.verdict != "done":
                self._dependents.cancel(step.ending.why)
            self._carry_out(step, before.job, why)
            if step.phase is Phase.OVER:
                code = 0 if step.ending.verdict == "done" else 1
                raise Leave(f"leaves without doing anything: the chain has ended with {why}", code)
        else:
            self._carry_out(step)
        self._tell_dependents()
        self._dependents.begin_counting(self._began_with)

    def fields(self) -> Dict[str, Any]:
        """Return the link's place in its chain and where it starts from, for its marks."""
        fields: Dict[str, Any] = {"link": self._job.link, "failures": self._failures}
        if self._began_with:
            fields.update(self._began_with.fields())
        fields["avoids"] = ",".join(self.later.list_avoided())
        return fields

    def restart(self, job: Job, failures: int) -> None:
        """Note that the tasks start again, after so many failures in a row, from the newest checkpoint."""
        self._job, self._failures = job, failures
        self._look_at_checkpoint()

    def exclude(self, nodes: Sequence[str], why: str) -> None:
        """Let later links avoid nodes at fault, while this one goes on without them."""
        self._exclude(nodes, why, self._job.claimant)

    def end(
        self,
        code: int,
        hosts: Sequence[str],
        signalled: Optional[str],
        verdict: Optional[Verdict] = None,
        judged: Optional[Judged] = None,
    ) -> Tuple[Ending, bool]:
        """Judge how the link ended, leave its mark, and submit the next link if `begin` could not.

        Return the judgement, and True if a next link may go on.
        """
        if judged is None:
            # Should Slurm not answer in time.
            self._job.leave(marks.ENDED, self.fields_of_end(code, signalled))
            judged = self.judge(code, hosts, signalled, verdict)
        self._job.leave(marks.ENDED, {**self.fields(), **judged.fields})
        return judged.ending, self._go_on(judged.step, judged.ending)

    def fields_of_end(self, code: int, signalled: Optional[str] = None) -> Dict[str, Any]:
        """Return the fields of a mark for an end that is not judged yet."""
        return dict(self.fields(), exit_code=code, ended=int(time.time()), signal=signalled)

    def judge(
        self, code: int, hosts: Sequence[str], signalled: Optional[str], verdict: Optional[Verdict] = None
    ) -> Judged:
        """Judge how the tasks ended, by Slurm's words, the logs and the checkpoints."""
        job = self._job
        fields = self.fields_of_end(code, signalled)
        is_slurms = self._settings.scheduler == SLURM and bool(self._slurm.job_id)
        # Slurm may not say yet that it ends the job.
        record = self._slurm.show_job(self._slurm.job_id) if is_slurms else None
        facts = facts_of_end(job, job.id, code, record, signalled)
        if signalled and not hosts and not is_slurms:  # only a user ends it before its tasks
            facts = facts._replace(state="CANCELLED")
        progress = False
        with job.best_effort("its newest checkpoint is not known"):
            progress = self._is_beginning_known and checkpoints.is_newer(self._progress(), self._began_with)
        if self._is_beginning_known and self._settings.checkpoints:
            facts = facts._replace(progress=progress)
        judged_fields, ending = judge_end(job, self._slurm, job.id, facts, hosts, job.tasks_began)
        if verdict and facts.state != "CANCELLED":
            judged_fields = {"step": judged_fields.get("step")}  # no rank failed first
            nodes = tuple(host for host in hosts if host in verdict.nodes) if verdict.continues else ()
            word = "stop" if not verdict.continues else "exclude" if nodes else "continue"
            ending = Ending(word, verdict.rule, marks.quote(verdict.why), nodes)
        requeues = int(job.attempt.rpartition(".")[2])
        if ending.rule == "ended_by_user" and record and record.restarts > requeues:
            ending = ending._replace(why="somebody requeued it")
        has_next = self.later.next_job() is not None
        # Where there are no checkpoints, nobody can say that it made no progress.
        progress = progress or not self._settings.checkpoints
        step = decide_after_end(self._chain, job.link, ending, self._failures, progress, has_next)
        ending = step.ending or ending
        state = record and state_at_end(record.state, record.reason, record.preempted, record.requeue)
        fields.update(judged_fields, state="CANCELLED" if facts.state == "CANCELLED" else state)
        fields.update(fields_of(ending))
        return Judged(fields, ending, step)

    def _go_on(self, step: Transition, ending: Ending) -> bool:
        """Prepare what follows this link, or keep it from running; return True if a next one may go on."""
        is_over = step.phase is Phase.OVER
        self._job.say(f"{ending.verdict}: {ending.why}" if is_over else ending.why)
        not_submitted = "the chain ends here: its next link could not be submitted"
        self._carry_out(step, why=ending.why, not_submitted=not_submitted)
        if not is_over and 1 < self._chain.links <= self._job.link:
            self._job.say(f"the chain ends here: it was to have {self._chain.links} links")
        self._dependents.wait_for_repeated()
        goes_on = not is_over and self.later.may_exist()
        if goes_on:
            self._tell_dependents(also_late_ones=True)
        elif ending.verdict != "done":
            self._dependents.cancel(ending.why)
        if ending.verdict == "done":
            self._tidy()  # for whoever reads its checkpoints next
        return goes_on

    def hooks(self) -> List[Hook]:
        """Return the hooks for other stages."""
        return self._dependents.hooks(self._tell_dependents, self._progress)

    def _tell_dependents(self, also_late_ones: bool = False) -> None:
        """Let the stages after the chain wait for this link and the next one.

        Where the launcher submits all links, it does so before the stage, which waits for all from the first.
        """
        if self._chain.links > 1 and self._chain.from_job:
            if also_late_ones:
                self._dependents.wait_until_submitted()
            jobs = [self._slurm.job_id, self.later.next_job()]
            self._dependents.wait_for([job_id for job_id in jobs if job_id])

    def _carry_out(
        self,
        step: Transition,
        failed_under: str = "",
        why: str = "",
        not_submitted: str = "tries once more to submit the next link when its tasks have ended",
    ) -> None:
        """Avoid the nodes at fault, and end the chain or submit the next link."""
        nodes = step.ending.nodes if step.ending else ()
        if step.ending and nodes:
            self._exclude(nodes, step.ending.why, failed_under or self._job.claimant)
        if step.phase is Phase.OVER:
            with self._job.best_effort("later links may run"):
                self.later.end_chain(why)
        elif step.submits:
            with self._job.best_effort(not_submitted):
                if not self.later.submit_next():
                    self._job.say(not_submitted)

    def _exclude(self, nodes: Sequence[str], why: str, failed_under: str) -> None:
        with self._job.best_effort(f"does not exclude {','.join(nodes)}"):
            self.later.exclude(nodes, why, failed_under)

    def _look_at_checkpoint(self) -> None:
        """Tidy what killed tasks have left, and note the checkpoint from which the tasks begin."""
        self._tidy()
        self._is_beginning_known = False
        with self._job.best_effort("its newest checkpoint is not known"):
            self._began_with = self._progress()
            self._is_beginning_known = True

    def _tidy(self) -> None:
        directory = self._settings.checkpoints
        if self._settings.engine == "nemo" and directory:
            with self._job.best_effort(f"{directory} could not be tidied"):
                from slipway.supervisor import nemo_checkpoints

                nemo_checkpoints.tidy(directory, self._job.attempt, self._job.say)

    def _progress(self) -> Optional[checkpoints.Progress]:
        return checkpoints.progress(self._settings.checkpoints, self._settings.engine)
