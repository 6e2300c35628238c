"""What keeps a chain of jobs from going on, or a job from saving before its end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.checks.findings import Finding, error, warning
from launcher.estimates.values import Values
from launcher.plan import Plan
from launcher.slurm.times import parse_time_limit

_LINKS = "resilience.links"
_SAVE = "resilience.save_before_end"
_SIGNAL = re.compile(r"(?:R?B?:)?(?:SIG)?\w+@(\d+)", re.ASCII)
# Without these a next job would begin anew.
_NEEDED = ("exp_manager.resume_if_exists", "exp_manager.create_checkpoint_callback")


def requeue_problems(plan: Plan) -> Iterator[Finding]:
    """Of a chain that Slurm requeues too, nobody could say which job is the next."""
    queue, links = plan.job.queue, plan.job.chain.links
    by_flag = "requeue" in queue.further
    if links == 1 or (queue.requeue is False and not by_flag):
        return
    key, fix = ("cluster.sbatch.requeue", "null") if by_flag else ("cluster.requeue", "False")
    given = True if by_flag else queue.requeue
    told = (
        "whatever the site's default is" if given is None else "Slurm would start a job again that it ended"
    )
    yield error(
        "chain.requeue",
        key,
        given,
        f"{told}, and so does the chain of {links} jobs: there can be one of them",
        f"{key}={fix}, or {_LINKS}=1",
        also=(_LINKS,),
    )


def dependency_problems(plan: Plan) -> Iterator[Finding]:
    """A next job waits for the one before it, which no alternative may make needless."""
    dependency, key = plan.job.queue.dependency, f"{plan.job.stage}.run.dependency"
    if plan.job.chain.links > 1 and dependency is not None and "?" in dependency:
        told = "alternatives (?) cannot be waited for together with the job before in a chain"
        yield error("chain.dependency", key, dependency, told, f"{key}=singleton", also=(_LINKS,))


def resume_problems(plan: Plan) -> Iterator[Finding]:
    """Each job of a chain goes on from the last one's checkpoint."""
    values = Values(plan.job.config or {})
    if plan.job.chain.links == 1:
        return
    for key in _NEEDED:
        if values.raw(key) is False:
            told = f"each of the {plan.job.chain.links} jobs of the chain would begin anew"
            yield error("chain.resume", key, False, told, f"True, or {_LINKS}=1", also=(_LINKS,))


def save_problems(plan: Plan) -> Iterator[Finding]:
    """The job is told to save before its limit ends it, and not as soon as it begins."""
    limit_key, given = f"{plan.job.stage}.run.time_limit", plan.job.resources.time_limit
    limit, signal = _seconds(given), plan.job.queue.signal
    found = _SIGNAL.fullmatch(signal or "")
    if found and limit is not None and int(found[1]) >= limit:
        yield error(
            "time.save",
            _SAVE,
            int(found[1]),
            f"not less than the time limit, {given}: the job would be told to save as soon as it begins",
            f"less than {limit} seconds, or {_SAVE}=auto; where cluster.signal is set, that is {signal}",
            also=(limit_key, "cluster.signal"),
        )
    if plan.job.chain.links > 1 and limit is None and signal is None:
        yield warning(
            "time.save",
            limit_key,
            given,
            "without a limit of its own no job of the chain is told to save before the partition's ends it",
            f"{limit_key}=1-00:00:00, or {_SAVE}=300",
            also=(_LINKS,),
        )


def _seconds(limit: str | None) -> int | None:
    try:
        return parse_time_limit(limit) if limit is not None else None
    except ValueError:
        return None  # time.limit tells
