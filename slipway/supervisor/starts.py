"""The starts of a job's tasks: the first one, and those after a crash or a hang, inside the same allocation.

A new start needs no place in the queue. It leaves a mark of its own, first with the end of the tasks before,
so that the next link judges rightly whenever the supervisor dies.
"""

import time
from typing import Any, Dict, List, Optional, Sequence

from slipway.common.backoff import double_wait
from slipway.common.node import marks
from slipway.common.node.settings import EXIT_INTERRUPTED, LOCAL, why_lost
from slipway.supervisor.chain import Allocation, Ending, Phase, why_not_again
from slipway.supervisor.hooks import Verdict
from slipway.supervisor.job import Job
from slipway.supervisor.judgement import must_continue
from slipway.supervisor.link import Judged, Link
from slipway.supervisor.nodes import Nodes, SickNodes, find_nodes
from slipway.supervisor.slurm import Slurm
from slipway.supervisor.step import ask_slurm_for_loss, meet, prepare_command, run_tasks
from slipway.supervisor.tasks import Signals
from slipway.supervisor.termination import Termination
from slipway.supervisor.time_limit import TimeLimit

# Seconds for the end of a killed step: Slurm itself gives up on one after `UnkillableStepTimeout`, 60. No
# step ends on a node that Slurm cannot reach.
_STEP_SECONDS, _UNREACHED_SECONDS = 90.0, 15.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0


class Starts:
    """The starts of a job's tasks.

    Attributes
    ----------
    job
        The job, with the number and the time of its last start.
    hosts
        The nodes of the last tasks; empty before the first start.
    code
        Their exit code.
    verdict
        The verdict for which they were ended; ``None`` if no detector ended them.
    judged
        Their judged end, if it was judged already.
    """

    def __init__(self, job: Job, slurm: Slurm, link: Link, limit: TimeLimit) -> None:
        self.job, self._slurm, self._link, self._limit = job, slurm, link, limit
        self._nodes = Nodes([])
        self._ended: Dict[str, Any] = {}
        # Of nodes that are left out: Slurm knows them until it gives those up.
        self._lost_steps: List[str] = []
        self.hosts: List[str] = []
        self.code = 1
        self.verdict: Optional[Verdict] = None
        self.judged: Optional[Judged] = None

    def run(self, command: Sequence[str], signals: Signals) -> None:
        """Run the tasks, and again after each end that allows it.

        Raises
        ------
        Signalled
            If the job was signalled while no tasks ran.
        SickNodes
            If too few nodes are healthy; `give_up` notes it.
        OSError
            If Slurm does not name the nodes, or there is no such program.
        """
        self._nodes = find_nodes(self.job.settings)
        self._run_once(command, signals)
        while self._prepare_another(signals):
            self._run_once(command, signals)

    def give_up(self, sick: SickNodes) -> None:
        """Note that the tasks do not start because of sick nodes."""
        self.hosts, self.verdict = sick.hosts, sick.verdict
        if not self.job.restarts:
            self._mark_start()

    def _run_once(self, command: Sequence[str], signals: Signals) -> None:
        job, self.code, self.verdict = self.job, 1, None
        termination = Termination(job, self._slurm)
        if job.settings.health:
            from slipway.supervisor.gate import pass_gate  # late: most jobs have none

            pass_gate(job, self._nodes, job.settings.health, self._link.later, signals)
        self.hosts = self._nodes.choose()
        meet(job, self.hosts)
        self._mark_start()
        prepared = prepare_command(job, command, self.hosts, signals)
        signals.check()
        code = run_tasks(job, self._limit, prepared, signals, termination, self._link.hooks())
        if code == 0 and job.settings.scheduler != LOCAL:
            code = ask_slurm_for_loss(job, self._slurm)
        job.say(f"the tasks ended with exit code {code}")
        if termination.verdict:
            code = code if code not in (0, EXIT_INTERRUPTED) else 1  # tasks that were ended did not succeed
        elif code == 0 and must_continue(job, signals.first):
            code = EXIT_INTERRUPTED  # its engine says that it is done, and it is not
        self.code, self.verdict = code, termination.verdict

    def _mark_start(self) -> None:
        """Leave the mark of a start: the first one's is that of the job."""
        job, fields = self.job, dict(self._ended)
        fields.update(started=int(time.time()), nodes=",".join(self.hosts))
        fields.update(left_out=self._nodes.describe_left_out(), time_limit=self._limit.seconds)
        with job.best_effort("its place in the chain is not known"):
            fields.update(self._link.fields())
        if job.restarts:
            job.leave(_name_mark(job.restarts), fields)
        else:
            job.leave(marks.STARTED, fields, sync=False)

    def _prepare_another(self, signals: Signals) -> bool:
        """Prepare a new start after an end; return False where the job ends with it.

        Raises
        ------
        Signalled
            If the job was signalled meanwhile.
        """
        job, link, most = self.job, self._link, self.job.settings.chain.restarts
        if not most or signals.first or self.code in (0, EXIT_INTERRUPTED):
            return False
        if why_lost(job.directory, job.settings.tag):
            return False
        job.leave(_name_mark(job.restarts + 1), link.fields_of_end(self.code))  # should this process die now
        judged = link.judge(self.code, self.hosts, None, self.verdict)
        ending, is_over = judged.ending, judged.step.phase is Phase.OVER
        signals.check()
        why_not = ending.why if is_over else self._why_not(ending) or self._end_step(ending, signals)
        if why_not:
            if not is_over:
                job.say(f"does not start its tasks again: {why_not}")
            self.judged = judged
            return False
        if ending.nodes and self._nodes.can_spare(ending.nodes):
            for node in ending.nodes:
                self._nodes.leave_out(node, ending.why)
            link.exclude(ending.nodes, ending.why)
        self._ended = judged.fields
        job.leave(_name_mark(job.restarts + 1), judged.fields)
        self.job = job._replace(restarts=job.restarts + 1, restarted=int(time.time()))
        link.restart(self.job, judged.step.failures)
        from slipway.supervisor.watching import tell_restart  # late: it imports much

        tell_restart(self.job, ending)
        job.say(f"{ending.why}: starts its tasks again, {self.job.restarts} of at most {most} times")
        signals.check()
        return True

    def _why_not(self, ending: Ending) -> str:
        """Return why the tasks are not started again, by the judgement and what Slurm says of the job."""
        settings = self.job.settings
        # The nodes that a detector names are suspects: if there are no others, they are tried again.
        allocation = Allocation(has_healthy=bool(self.verdict) or self._nodes.can_spare(ending.nodes))
        if settings.scheduler != LOCAL:
            record = self._slurm.show_job(self._slurm.job_id)
            is_running = (
                record is not None and record.state == "RUNNING" and not record.preempted[:1].isdigit()
            )
            left = record.end - time.time() if record and record.time_limit and record.end else None
            allocation = allocation._replace(is_running=is_running, seconds=left)
        return why_not_again(
            settings.chain, self.job.restarts, ending, allocation, settings.save_before_end or 0
        )

    def _end_step(self, ending: Ending, signals: Signals) -> str:
        """Wait until Slurm knows the step of the tasks no more, and end what is left of it.

        Return why the tasks cannot be started again; a node that does not let go of its tasks is left out.
        """
        if self.job.settings.scheduler == LOCAL:
            return ""
        began, turn = time.monotonic(), 0
        while True:
            known, waited = self._slurm.find_tasks_steps(), time.monotonic() - began
            if known is None:
                return "whether its step is gone could not be asked"
            steps = [step for step in known if step not in self._lost_steps]
            if not steps:
                return ""
            stuck = self._slurm.down_nodes(self.hosts) if waited > _UNREACHED_SECONDS else []
            if stuck and self._nodes.can_spare([*stuck, *ending.nodes]):
                for node in stuck:
                    self._nodes.leave_out(node, "its tasks could not be ended")
                self._lost_steps += steps
                return ""
            if waited > _STEP_SECONDS:
                return f"its step {steps[0]} could not be ended"
            self._slurm.kill(steps)
            signals.sleep(double_wait(turn, _FIRST_PAUSE, _LONGEST_PAUSE))
            turn += 1


def _name_mark(number: int) -> str:
    return f"{marks.RESTARTED}-{number}"
