"""Names: keys that NeMo may not know, and jobs that wait for each other because they are called the same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, warning
from launcher.errors import one_line
from launcher.estimates.values import Values, full
from launcher.plan import Plan

# Closer than `did_you_mean` wants it: NeMo has keys that our tree does not show, and they are no mistakes.
_LIKENESS = 0.8

_RUNS_SHOWN = 3


def key_problems(values: Values, facts: Facts) -> Iterator[Finding]:
    """Keys of NeMo's nodes that neither a shipped file shows nor a check reads, and that are near to one."""
    for key in facts.added_keys or ():
        near = nearest_key(key, facts.shipped_keys or ())
        if near is not None:
            told = "no shipped configuration has this key"
            yield warning("keys.unknown", key, values.raw(key), told, f"did you mean {full(near)}?")


def nearest_key(key: str, shipped: Iterable[str]) -> str | None:
    """The shipped key that a key is likely to be a slip of: of a like name, first of all in the same node.

    `trainer`, `exp_manager` and `model` have different readers: what is meant for one is no slip in another.
    """
    node, _, name = key.rpartition(".")
    top = f"{key.partition('.')[0]}."
    likeness = {}
    for other in shipped:
        if not other.startswith(top):
            continue
        other_node, _, other_name = other.rpartition(".")
        ratio = difflib.SequenceMatcher(None, _plain(name), _plain(other_name)).ratio()
        if ratio >= _LIKENESS:
            likeness[other] = (ratio, other_node == node)
    return max(sorted(likeness), key=lambda other: likeness[other]) if likeness else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def singleton_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Slurm's `singleton` goes by the job's name and the user: other directories make no difference to it."""
    others = facts.same_job_name or ()
    dependency = plan.job.queue.dependency
    if not others or dependency is None or "singleton" not in dependency:
        return
    named = one_line(", ".join(others[:_RUNS_SHOWN])) + (", ..." if len(others) > _RUNS_SHOWN else "")
    key = f"{plan.job.stage}.run.name"
    yield Finding(
        "run.singleton",
        Severity.WARNING,
        key,
        f"{key}={plan.paths.run_name}: jobs of {named} are called {plan.paths.job_name} too, and"
        f" dependency={dependency} makes them wait for each other",
        f"{key}=..., another cluster.job_name_prefix, or {plan.job.stage}.run.dependency=null",
        (f"{plan.job.stage}.run.dependency",),
    )
