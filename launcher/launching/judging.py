"""The scheduler's verdict on a script, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.drafting import Draft, render_again
from launcher.errors import UserError
from launcher.launching.submitting import Patience, Tell, validate
from launcher.schedulers.base import Scheduler
from launcher.slurm.commands import SchedulerSilent, Unreachable
from supervisor.excluded import ExcludedNode


def judged(
    scheduler: Scheduler, made: Draft, template_dir: Path | None, tell: Tell, patience: Patience
) -> tuple[Draft, list[str]]:
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
    avoided = made.plan.job.queue.avoided
    try:
        told = validate(scheduler, made.rendered.script, tell, patience)
    except UserError as error:
        if not avoided or isinstance(error, Unreachable) or isinstance(error.__cause__, SchedulerSilent):
            raise
        told, refusal = error.message, True
    else:
        refusal = False
    if not avoided or told is None:
        return made, [told] if told else []
    bare = _avoiding(made, (), template_dir)
    base = validate(scheduler, bare.rendered.script, tell, patience)
    if base is not None and not refusal:
        return made, [told]  # it waits in any case
    kept: list[ExcludedNode] = []
    warnings = [base] if base else []
    for node in avoided:
        tried = _avoiding(made, [*kept, node], template_dir)
        try:
            words = validate(scheduler, tried.rendered.script, tell, patience)
        except UserError as error:
            words = error.message
        if words is None or words == base:
            kept.append(node)
        else:
            warnings.append(f"{node.node} is not avoided, on which job {node.job} failed: {words}")
    return _avoiding(made, kept, template_dir), warnings


def _avoiding(made: Draft, nodes: Sequence[ExcludedNode], template_dir: Path | None) -> Draft:
    return render_again(made, made.plan.paths.number, template_dir, nodes)
