"""A job as a link of its chain: what came before it, what comes next, how it ended, which nodes to avoid.

The decisions are in `slipway.supervisor.chain`; this carries them out. Nothing in it ends the job but
`Leave`.
"""

import os
import re
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from slipway.common.files import plain
from slipway.common.node import checkpoints, marks
from slipway.common.node.excluded import ExcludedNode, append_excluded, read_excluded
from slipway.common.node.marks import ChainEnd, JobAttempt
from slipway.common.node.settings import SLURM
from slipway.common.node.slurm_states import LIVE, STATES, state_at_end
from slipway.supervisor import chain
from slipway.supervisor.chain import Before, Effect, Ending
from slipway.supervisor.following import Following, name_script
from slipway.supervisor.hooks import Hook
from slipway.supervisor.job import Job, Leave
from slipway.supervisor.slurm import JobRecord, Slurm, submitted_id

# The modules of the end are imported when it comes: the tasks start earlier.
if TYPE_CHECKING:
    from slipway.common.node.judging import Facts

_SUBMISSION_ATTEMPTS = 3
# Rules of ends that the program itself knows more of.
_UNEXPLAINED = ("mistake", "failed")
# Seconds between counts of checkpoints, between reports of new links to the stages after a chain,
# and that Slurm may take.
_COUNT_SECONDS, _TELL_SECONDS, _LOOK_BUDGET = 20.0, 60.0, 240.0
# Lines of NeMo and Megatron-LM when they save and leave because they were told to, or by their own limit.
_SAVED_AND_LEFT = (
    r"Received SIGTERM, saving checkpoint|Time limit reached\. Elapsed time"
    r"|exiting program after (?:receiving SIGTERM|[0-9.]+ minutes)"
)
_REACHED_MAX_STEPS = r"max_steps=[0-9]+. reached"


class Link:
    """One job of a chain; a launch without a chain is a chain of one link."""

    def __init__(self, job: Job, slurm: Slurm) -> None:
        self._job, self._slurm = job, slurm
        self._settings, self._chain = job.settings, job.settings.chain
        self._following = Following(job, slurm)
        self._failures = 0
        self._began_with: Optional[checkpoints.Progress] = None
        self._is_beginning_known = False
        self._next_job: Optional[str] = None
        self._restarts = int(job.attempt.rpartition(".")[2])
        # The last attempt of the link before, and what was found of its end, where it left no word of it.
        self._judged_before: Tuple[Optional[JobAttempt], Dict[str, Any]] = (None, {})

    # --- what the supervisor calls ---

    def begin(self) -> None:
        """Look at what came before, and submit what comes next: so a node that dies does not end the chain.

        Raises
        ------
        Leave
            If the chain has ended, or that of the stage before is not done: the job has nothing to do.
        """
        self._following.require_done()
        self._tidy()
        with self._job.best_effort("its newest checkpoint is not known"):
            self._began_with = self._progress()
            self._is_beginning_known = True
        before = None
        with self._job.best_effort("what came before is not known"):
            # A further job of a stage that is repeated continues nothing.
            is_further = self._job.link > 1 and self._chain.links > 1
            before = self._look_at_links_before() if is_further else None
        step = chain.look_back(self._chain, self._job.link, before, self._has_successor())
        self._failures = step.failures
        if before and before.is_judged_now and step.ending:
            self._judge_for(before.job, step.ending)
        if step.phase is chain.Phase.OVER and step.ending and step.ending.verdict != "done":
            self._following.cancel(step.ending.why)
        self._carry_out(step.effects, "tries once more to submit the next link when its tasks have ended")
        self._tell_followers()
        self._following.begin_counting(self._began_with)

    def fields(self) -> Dict[str, Any]:
        """Return the link's place in its chain and where it starts from, for its marks."""
        fields: Dict[str, Any] = {"link": self._job.link, "failures": self._failures}
        if self._began_with:
            fields.update(self._began_with.fields())
        fields["avoids"] = ",".join(self._avoided())
        return fields

    def must_continue(self, signalled: Optional[str]) -> bool:
        """Return True for tasks that ended with 0, as of a training that is done, and only saved and left."""
        if self._settings.save_signal != "TERM":
            return False
        lines = self._evidence(self._job.id, self._job.began)
        if any(re.search(_REACHED_MAX_STEPS, line) for line in lines):
            return False
        if not signalled and not any(re.search(_SAVED_AND_LEFT, line) for line in lines):
            return False
        sent = f" when they were sent {signalled}" if signalled else ""
        self._job.say("it is not done: its tasks saved and left" + sent)
        return True

    def earlier_at_work(self) -> str:
        """Return the job of an earlier link that Slurm has not ended yet, and Slurm's word for it.

        A link begins before that where its dependency was lost, as by ``scontrol update dependency=``.
        """
        if self._job.link == 1 or self._chain.links == 1:
            return ""
        queued = self._slurm.queued_jobs(self._settings.tag) or {}
        # One that waits may wait for this one: it was requeued.
        earlier = [queued[link] for link in queued if link < self._job.link and not queued[link].waits]
        return f"{earlier[0].job_id}, which is {earlier[0].state}" if earlier else ""

    def abandon(self) -> None:
        """Cancel the later links of a launch that is no longer there."""
        queued = self._slurm.queued_jobs(self._settings.tag) if self._chain.links > 1 else None
        later = [job.job_id for link, job in (queued or {}).items() if link > self._job.link]
        if later:
            self._slurm.cancel(later)

    def end(self, code: int, hosts: Sequence[str], signalled: Optional[str]) -> None:
        """Judge how the link ended, leave its mark, and submit the next link if `begin` could not."""
        fields = dict(self.fields(), exit_code=code, ended=int(time.time()), signal=signalled)
        self._job.leave(marks.ENDED, fields)  # should Slurm not answer in time
        is_slurms = self._settings.scheduler == SLURM and bool(self._slurm.job_id)
        # Slurm may not say yet that it ends the job.
        record = self._slurm.show_job(self._slurm.job_id) if is_slurms else None
        facts = self._facts(self._job.id, code, record, signalled)
        if signalled and not hosts and not is_slurms:  # nobody but a user ends it before its tasks
            facts = facts._replace(state="CANCELLED")
        progress = False
        with self._job.best_effort("its newest checkpoint is not known"):
            progress = self._is_beginning_known and checkpoints.is_newer(self._progress(), self._began_with)
        if self._is_beginning_known and self._settings.checkpoints:
            facts = facts._replace(progress=progress)
        judged_fields, ending = self._judge(self._job.id, facts, hosts, self._job.began)
        if ending.rule == "ended_by_user" and record and record.restarts > self._restarts:
            ending = ending._replace(why="somebody requeued it")
        step = chain.after_end(
            self._chain, self._job.link, ending, self._failures, progress, self._has_successor()
        )
        ending = step.ending or ending
        state = record and state_at_end(record.state, record.reason, record.preempted, record.requeue)
        fields.update(judged_fields, state="CANCELLED" if facts.state == "CANCELLED" else state)
        fields.update(_fields_of(ending))
        self._job.leave(marks.ENDED, fields)
        is_over = step.phase is chain.Phase.OVER
        self._job.say(f"{ending.verdict}: {ending.why}" if is_over else ending.why)
        self._carry_out(step.effects, "the chain ends here: its next link could not be submitted")
        if not is_over and 1 < self._chain.links <= self._job.link:
            self._job.say(f"the chain ends here: it was to have {self._chain.links} links")
        self._following.wait_for_repeated()
        if not is_over and self._may_have_successor():
            self._tell_followers(also_late_ones=True)
        elif ending.verdict != "done":
            self._following.cancel(ending.why)
        if ending.verdict == "done":
            self._tidy()  # for whoever reads its checkpoints next

    def hooks(self) -> List[Hook]:
        """Return what is done beside the tasks: the stages that follow are told of links and checkpoints."""
        if not self._following.is_watching:
            return []

        def look(job: Job) -> Dict[str, List[str]]:
            self._tell_followers()
            if self._following.is_counting:
                self._following.repeat(self._progress())
            return self._following.waited_jobs

        def take(job: Job, waited_jobs: Dict[str, List[str]]) -> None:
            self._following.remember(waited_jobs)

        every = _COUNT_SECONDS if self._following.is_counting else _TELL_SECONDS
        return [Hook("the stages that follow", look, take, _LOOK_BUDGET, every)]

    def _tell_followers(self, also_late_ones: bool = False) -> None:
        """Let the stages after the chain wait for this link and the next one.

        Where the launcher submits all links, it does so before the stage, which waits for all from the first.
        """
        if self._chain.links > 1 and self._chain.from_job:
            if also_late_ones:
                self._following.wait_until_submitted()
            jobs = [self._slurm.job_id, self._job_of(self._job.link + 1)]
            self._following.wait_for([job_id for job_id in jobs if job_id])

    # --- what came before ---

    def _look_at_links_before(self) -> Before:
        directory, tags = self._job.directory, (self._settings.tag,)
        jobs: Dict[int, Optional[str]] = {1: marks.job_of(directory)}
        jobs.update(marks.later_jobs(directory, tags))
        attempts: Dict[int, JobAttempt] = {}
        for attempt in marks.read_attempts(directory, tags=tags):
            # Not one of a script that was submitted by hand; of a job that was requeued the last.
            if attempt.link < self._job.link and jobs.get(attempt.link) in (None, attempt.job_id):
                attempts[attempt.link] = attempt
        last = self._job.link - 1
        marked = max(attempts, default=0)
        began_with: Optional[checkpoints.Progress] = None
        failures = 0
        if marked:
            failures = attempts[marked].failures
            began_with = checkpoints.from_fields(attempts[marked]._asdict())
        newest = attempts.get(last)
        job_id = jobs.get(last) or (newest.job_id if newest else "")
        state = self._slurm.state_of(job_id) if job_id and self._settings.scheduler == SLURM else ""
        is_judged_now = False
        if newest and newest.verdict:
            ending = Ending(newest.verdict, newest.rule or "unknown", newest.why or "", ())
        elif job_id and STATES.get(state) not in LIVE:
            is_judged_now = True
            ending = self._judge_before(job_id, newest, state)
        else:
            ending = Ending()
        has_progressed = checkpoints.is_newer(self._began_with, began_with)
        return Before(
            job_id, ending, is_judged_now, state, failures, last - marked + bool(marked), has_progressed
        )

    def _judge_before(self, job_id: str, attempt: Optional[JobAttempt], state: str) -> Ending:
        hosts = attempt.nodes.split(",") if attempt and attempt.nodes else []
        facts = self._facts(
            job_id,
            attempt.exit_code if attempt else None,
            JobRecord(state) if state else None,
            attempt and attempt.signal,
        )
        judged_fields, ending = self._judge(job_id, facts, hosts, int(attempt.started or 0) if attempt else 0)
        self._judged_before = (attempt, dict(judged_fields, state=state))
        return ending

    def _judge_for(self, job_id: str, ending: Ending) -> None:
        """Leave the mark that the link before could not leave."""
        attempt, judged_fields = self._judged_before
        self._job.say(f"the link before, job {job_id}, left no word: {ending.why}")
        if attempt is None or attempt.verdict:
            return
        fields = dict(judged_fields, link=attempt.link, judged_by=f"job {self._job.claimant}")
        # Killed while it judged itself, it has left the first half of its mark.
        fields.update(exit_code=attempt.exit_code, ended=attempt.ended, signal=attempt.signal)
        fields.update(_fields_of(ending))
        is_first = not attempt.is_over
        marks.leave(self._job.directory, attempt.stem, marks.ENDED, self._settings.tag, fields, once=is_first)

    # --- how a link ended ---

    def _facts(
        self, job_id: str, code: Optional[int], record: Optional[JobRecord], signalled: Optional[str]
    ) -> "Facts":
        """Return how a job ended in Slurm's words; who cancelled it with Slipway knows better."""
        from slipway.common.node.judging import Facts

        facts = Facts(code, signal=signalled, save=self._settings.save_signal)
        if any(marks.cancelled_by(self._job.directory, job) for job in (job_id, job_id.partition("_")[0])):
            return facts._replace(state="CANCELLED")
        words = ("state", "reason", "preempted", "requeue") if record else ()
        return facts._replace(**{word: getattr(record, word) for word in words})

    def _judge(
        self, job_id: str, facts: "Facts", hosts: Sequence[str], since: int
    ) -> Tuple[Dict[str, Any], Ending]:
        """Return the judgement of an end, and what else a mark has of it."""
        from slipway.common.node.evidence import first_failure, last_step, own_words
        from slipway.common.node.judging import judge
        from slipway.common.node.rules import EXIT_INTERRUPTED

        fields: Dict[str, Any] = {}
        ending = Ending()
        with self._job.best_effort(f"how job {job_id} ended is not known"):
            lines, tasks = self._evidence(job_id, since), self._settings.tasks_per_node
            judgement = judge(facts, lines, hosts, tasks)
            if judgement.rule.nodes == "down" and self._settings.scheduler == SLURM:
                judgement = judge(facts, lines, hosts, tasks, self._slurm.down_nodes(hosts))
            nodes = tuple(judgement.nodes) if judgement.verdict == "exclude" else ()
            ending = Ending(judgement.verdict, judgement.rule.name, judgement.rule.means, nodes)
            fields["step"] = last_step(lines)
            if judgement.verdict != "done" and facts.code != EXIT_INTERRUPTED:
                fields["rank"], fields["host"] = first_failure(lines, hosts, tasks)
                said = own_words(lines, fields["host"]) if judgement.rule.name in _UNEXPLAINED else None
                ending = ending._replace(why=plain(said) if said else ending.why)
        return fields, ending

    def _evidence(self, job_id: str, since: int) -> List[str]:
        from slipway.common.node.evidence import evidence

        logs = [self._settings.log + job_id + extension for extension in (".out", ".err")]
        return evidence(logs, self._settings.failures, since)

    # --- effects ---

    def _carry_out(self, effects: Sequence[Effect], not_submitted: str) -> None:
        for effect in effects:
            if isinstance(effect, chain.LeaveJob):
                raise Leave(f"leaves without doing anything: {effect.why}", 0 if effect.is_success else 1)
            with self._job.best_effort(type(effect).__name__):
                if isinstance(effect, chain.ExcludeNodes):
                    self._exclude(effect.nodes, effect.why, effect.job or self._job.claimant)
                elif isinstance(effect, chain.EndChain):
                    self._end_chain(effect.why)
                elif not self._submit_next():
                    self._job.say(not_submitted)

    def _submit_next(self) -> bool:
        """Submit the next link, once; where the answer is lost, ask the queue."""
        job, following = self._job, self._job.link + 1
        if os.path.lexists(os.path.join(job.marks, marks.CHAIN_ENDED)):  # somebody has ended it meanwhile
            return True
        dependency = "--dependency=afterany:" + job.environment.get("SLURM_JOB_ID", "")
        flags = [dependency + (",singleton" if self._chain.singleton else ""), "--kill-on-invalid-dep=yes"]
        script = name_script(self._settings.script, self._settings.tag, following)
        avoided = ",".join(self._avoided())
        for attempt in range(1, _SUBMISSION_ATTEMPTS + 1):
            arguments = list(flags)
            if avoided:
                arguments.append("--exclude=" + avoided)  # in place of the header's
            if self._chain.begin:
                arguments.append("--begin=now")  # the header's was for the first
            answer = self._slurm.submit(script, [str(following), self._settings.tag], arguments)
            job_id = submitted_id(answer) or self._slurm.find_submitted(following)
            if job_id:
                self._next_job = job_id
                marks.claim(job.directory, job_id, following)
                place = f"link {following} of at most {self._chain.links}"
                job.say(f"{place} is job {job_id}, which waits for the end of this one")
                return True
            job.say(f"link {following} could not be submitted: {plain(answer.last_line)}")
            avoided = self._chain.exclude  # a node that has left the cluster since is no node to Slurm
            if attempt < _SUBMISSION_ATTEMPTS:
                time.sleep(attempt)
        return False

    def _exclude(self, nodes: Sequence[str], why: str, failed_under: str) -> None:
        """Keep later jobs of this run off nodes for a while, if Slurm can do without them."""
        job, names = self._job, ",".join(nodes)
        if self._chain.exclude_seconds <= 0 or not names:
            return
        answer = self._slurm.test_only(",".join([*self._avoided(), names]))
        if answer.code != 0:
            reason = (
                f"whether Slurm can do without it could not be asked, or it cannot: {plain(answer.last_line)}"
            )
            job.say(f"does not exclude {names}: {reason}")
            return
        until = int(time.time()) + self._chain.exclude_seconds
        try:
            append_excluded(
                self._settings.run_dir, [ExcludedNode(node, until, failed_under, why) for node in nodes]
            )
        except OSError as error:
            job.say(f"does not exclude {names}: excluded_nodes.tsv could not be written: {error}")
            return
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        job.say(f"excludes {names} until {moment}: {why}")
        later = self._later_jobs()
        if later and not self._slurm.update_excluded(later, ",".join(self._avoided())):
            job.say(f"job {','.join(later)} may run on {names} all the same: Slurm did not take the change")

    def _end_chain(self, why: str) -> None:
        """Keep later links from doing anything, and cancel those that wait; the first end is on record."""
        job = self._job
        if self._chain.links <= 1:
            return
        try:
            marks.end_chain(job.directory, ChainEnd("job " + job.claimant, why))
        except OSError:
            job.say(f"could not leave the mark {job.marks}/{marks.CHAIN_ENDED}")
        later = self._later_jobs()
        if not later and self._chain.from_job:
            lost = self._slurm.find_submitted(job.link + 1)
            later = [lost] if lost else []
        if later and not self._slurm.cancel(later):
            job.say("job {} leaves by itself when it begins".format(" ".join(later)))

    def _tidy(self) -> None:
        directory = self._settings.checkpoints
        if self._settings.engine == "nemo" and directory:
            with self._job.best_effort(f"{directory} could not be tidied"):
                from slipway.supervisor import nemo_checkpoints

                nemo_checkpoints.tidy(directory, self._job.attempt, self._job.say)

    # --- what is known ---

    def _progress(self) -> Optional[checkpoints.Progress]:
        return checkpoints.progress(self._settings.checkpoints, self._settings.engine)

    def _job_of(self, link: int) -> Optional[str]:
        claimed = marks.job_of(self._job.directory, link)
        # Where there is no room for a claim the link itself knows whom it has submitted.
        return claimed or (self._next_job if link == self._job.link + 1 else None)

    def _has_successor(self) -> bool:
        return self._job_of(self._job.link + 1) is not None

    def _may_have_successor(self) -> bool:
        """Return False if there is certainly no next link: its submission may have lost all answers."""
        following = self._job.link + 1
        if self._chain.links < following:
            return False
        if self._has_successor():
            return True
        queued = self._slurm.queued_jobs(self._settings.tag)
        lost = (queued or {}).get(following)
        if lost is not None:
            self._next_job = lost.job_id
            marks.claim(self._job.directory, lost.job_id, following)
        return queued is None or lost is not None

    def _later_jobs(self) -> List[str]:
        """Return the jobs of the links to come: of one, unless all were submitted at launch."""
        claimed = marks.later_jobs(self._job.directory, (self._settings.tag,))
        later = {link: job for link, job in claimed.items() if link > self._job.link}
        if self._next_job:
            later.setdefault(self._job.link + 1, self._next_job)
        return [later[link] for link in sorted(later)]

    def _avoided(self) -> List[str]:
        """Return the user's own excluded nodes, and those that failed under this run a short time ago."""
        names = [self._chain.exclude] if self._chain.exclude else []
        return names + [entry.node for entry in read_excluded(self._settings.run_dir, time.time())]


def _fields_of(ending: Ending) -> Dict[str, Any]:
    """Return an ending as it stands in a mark."""
    return {
        "rule": ending.rule,
        "verdict": ending.verdict,
        "why": plain(ending.why),
        "excluded": ",".join(ending.nodes),
    }
