"""The judgement of a link's end, for its marks and for its chain."""

import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from slipway.common.files import to_printable
from slipway.common.node import marks
from slipway.common.node.settings import EXIT_INTERRUPTED, SLURM
from slipway.supervisor.chain import Ending
from slipway.supervisor.job import Job
from slipway.supervisor.slurm import JobRecord, Slurm

# The modules of the end are imported when it comes: the tasks start earlier.
if TYPE_CHECKING:
    from slipway.common.node.judging import Facts

# Rules of ends that the program itself knows more of.
_UNEXPLAINED = ("mistake", "failed")
# Lines of NeMo and Megatron-LM when they save and leave because of a signal, or at their own limit.
_SAVED_AND_LEFT = (
    r"Received SIGTERM, saving checkpoint|Time limit reached\. Elapsed time"
    r"|exiting program after (?:receiving SIGTERM|[0-9.]+ minutes)"
)
_REACHED_MAX_STEPS = r"max_steps=[0-9]+. reached"


def must_continue(job: Job, signalled: Optional[str]) -> bool:
    """Return True if the tasks exited with 0 although the training is not finished."""
    if job.settings.save_signal != "TERM":
        return False
    lines = _evidence(job, job.id, job.tasks_began)
    if any(re.search(_REACHED_MAX_STEPS, line) for line in lines):
        return False
    if not signalled and not any(re.search(_SAVED_AND_LEFT, line) for line in lines):
        return False
    sent = f" when they were sent {signalled}" if signalled else ""
    job.say("it is not done: its tasks saved and left" + sent)
    return True


def facts_of_end(
    job: Job, job_id: str, code: Optional[int], record: Optional[JobRecord], signalled: Optional[str]
) -> "Facts":
    """Return how a job ended in Slurm's words; who cancelled it with Slipway knows better."""
    from slipway.common.node.judging import Facts

    facts = Facts(code, signal=signalled, save=job.settings.save_signal)
    if any(marks.cancelled_by(job.directory, name) for name in (job_id, job_id.partition("_")[0])):
        return facts._replace(state="CANCELLED")
    words = ("state", "reason", "preempted", "requeue") if record else ()
    return facts._replace(**{word: getattr(record, word) for word in words})


def judge_end(
    job: Job, slurm: Slurm, job_id: str, facts: "Facts", hosts: Sequence[str], since: int
) -> Tuple[Dict[str, Any], Ending]:
    """Return the judgement of an end, and what else a mark has of it."""
    from slipway.common.node.evidence import find_first_failure, find_last_step, quote_error
    from slipway.common.node.judging import judge

    fields: Dict[str, Any] = {}
    ending = Ending()
    with job.best_effort(f"how job {job_id} ended is not known"):
        lines, tasks = _evidence(job, job_id, since), job.settings.tasks_per_node
        judgement = judge(facts, lines, hosts, tasks)
        if judgement.rule.nodes == "down" and job.settings.scheduler == SLURM:
            judgement = judge(facts, lines, hosts, tasks, slurm.down_nodes(hosts))
        nodes = tuple(judgement.nodes) if judgement.verdict == "exclude" else ()
        ending = Ending(judgement.verdict, judgement.rule.name, judgement.rule.means, nodes)
        fields["step"] = find_last_step(lines)
        if judgement.verdict != "done" and facts.code != EXIT_INTERRUPTED:
            fields["rank"], fields["host"] = find_first_failure(lines, hosts, tasks)
            said = quote_error(lines, fields["host"]) if judgement.rule.name in _UNEXPLAINED else None
            ending = ending._replace(why=to_printable(said) if said else ending.why)
    return fields, ending


def fields_of(ending: Ending) -> Dict[str, Any]:
    """Return an ending as fields of a mark."""
    return {
        "rule": ending.rule,
        "verdict": ending.verdict,
        "why": to_printable(ending.why),
        "excluded": ",".join(ending.nodes),
    }


def _evidence(job: Job, job_id: str, since: int) -> List[str]:
    from slipway.common.node.evidence import evidence

    logs = [job.settings.log + job_id + extension for extension in (".out", ".err")]
    return evidence(logs, job.settings.failures, since)
