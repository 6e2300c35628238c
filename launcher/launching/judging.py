"""The scheduler's verdict on a script, before anything is written."""

from __future__ import annotations

from launcher.drafting import Draft
from launcher.errors import UserError
from launcher.launching.submission import validate
from launcher.schedulers.base import Scheduler
from launcher.slurm.commands import SchedulerSilent, Unreachable
from supervisor.excluded import ExcludedNode


def judged(scheduler: Scheduler, draft: Draft) -> tuple[Draft, list[str]]:
    """Let the scheduler judge a draft.

    Where it would refuse the job, or keep it waiting, because of nodes that failed before and are to be
    avoided, these are not avoided: a node may be gone from the cluster, or there may be too few others.

    Returns
    -------
    The draft, with fewer nodes to avoid where that was so, and what to tell the user.

    Raises
    ------
    UserError
        With the scheduler's own words, if it would refuse the job for another reason.
    """
    avoided = draft.plan.job.queue.avoided
    try:
        answer = validate(scheduler, draft.rendered.script)
    except UserError as error:
        if not avoided or isinstance(error, Unreachable) or isinstance(error.__cause__, SchedulerSilent):
            raise
        answer, refusal = error.message, True
    else:
        refusal = False
    if not avoided or answer is None:
        return draft, [answer] if answer else []
    base = validate(scheduler, draft.replanned(avoided=()).rendered.script)
    if base is not None and not refusal:
        return draft, [answer]  # it waits in any case
    kept: list[ExcludedNode] = []
    warnings = [base] if base else []
    for node in avoided:
        try:
            answer = validate(scheduler, draft.replanned(avoided=[*kept, node]).rendered.script)
        except UserError as error:
            answer = error.message
        if answer is None or answer == base:
            kept.append(node)
        else:
            warnings.append(f"{node.node} is not avoided, on which job {node.job} failed: {answer}")
    return draft.replanned(avoided=kept), warnings
