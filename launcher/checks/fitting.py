"""A check, and what makes one of a function that knows less than a plan and all facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity
from launcher.checks.rules import batches, elastic, gpus, limits, model, names
from launcher.checks.rules.layout import problems_at
from launcher.errors import one_line
from launcher.estimates.parallelism import read_parallel_config
from launcher.estimates.values import Values, full
from launcher.plan import Plan

TRAINER = "engine.megatron"
# How its messages name keys: as in the file that it reads, which has no node `training`.
_KEY = re.compile(r"(?P<key>[\w.]+)(=| is missing)")
_NODE = re.compile(r"(?<![\w./])(?=(trainer|exp_manager|model|resume)\.\w)")


class Check(NamedTuple):
    """A check: a pure function of a plan and of what is known of files and the cluster.

    Attributes
    ----------
    id
        Stable: users write it in ``--no-check=ID``.
    tells
        What it looks at, in one line of the documentation.
    find
        The findings; none if all is well.
    needs
        Fields of `Facts` without which it is skipped. ``cluster.nodes`` is a part of one: it is skipped where
        `missing` of ``cluster`` has the reason, and has nothing to look at where nobody asked.
    """

    id: str
    tells: str
    find: Callable[[Plan, Facts], Iterable[Finding]]
    needs: tuple[str, ...] = ()


def trainer_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if facts.trainer_verdict:
        named = _KEY.match(facts.trainer_verdict)
        key = full(named["key"]) if named else None
        yield Finding(TRAINER, Severity.ERROR, key, one_line(_NODE.sub("training.", facts.trainer_verdict)))


def of_nemo(find: Callable[[Values], Iterable[Finding]]) -> Callable[[Plan, Facts], Iterable[Finding]]:
    """A check of NeMo's nodes, of jobs that have them."""

    def ask(plan: Plan, facts: Facts) -> Iterable[Finding]:
        return find(Values(plan.job.config)) if plan.job.config is not None else ()

    return ask


def of_engine(find: Callable[[Values, str], Iterable[Finding]]) -> Callable[[Plan, Facts], Iterable[Finding]]:
    """A check of NeMo's nodes whose answer depends on who reads them."""

    def ask(plan: Plan, facts: Facts) -> Iterable[Finding]:
        return find(Values(plan.job.config), plan.job.engine) if plan.job.config is not None else ()

    return ask


def at_node_count(check: str) -> Callable[[Plan, Facts], Iterator[Finding]]:
    """A check of the layout at the plan's node count, with the ways out."""

    def ask(plan: Plan, facts: Facts) -> Iterator[Finding]:
        values, nodes = Values(plan.job.config or {}), plan.job.resources.nodes
        shape = read_parallel_config(values)
        if shape is None or elastic.is_elastic(plan.job.resources):  # which looks at all of its counts
            return
        for found in problems_at(shape, nodes):
            if found.id == check:
                # Imported late: most layouts fit.
                from launcher.checks.remedies import ways_out

                yield replace(found, fix=ways_out(check, values, shape, plan, facts))

    return ask


def context_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The context size, with others that would do at the plan's node count."""
    values = Values(plan.job.config or {})
    shape = read_parallel_config(values)
    for found in model.context_problems(values, plan.job.engine):
        if shape is None or found.fix:
            yield found
        else:
            from launcher.checks.remedies import ways_out  # late, as above

            yield replace(found, fix=ways_out(found.id, values, shape, plan, facts))


def rampup_problems(plan: Plan, facts: Facts) -> Iterable[Finding]:
    values = Values(plan.job.config or {})
    shape = read_parallel_config(values)
    if shape is None or elastic.is_elastic(plan.job.resources):
        return ()
    return batches.rampup_problems(values, shape, plan.job.resources.nodes)


def gpu_problems(plan: Plan, facts: Facts) -> Iterable[Finding]:
    if plan.job.config is None:
        return ()
    return gpus.gpu_problems(Values(plan.job.config), plan.job.resources, facts)


def limit_problems(plan: Plan, facts: Facts) -> Iterable[Finding]:
    return limits.limit_problems(_limit_key(plan), plan.job.resources.time_limit)


def max_time_problems(plan: Plan, facts: Facts) -> Iterable[Finding]:
    values = Values(plan.job.config or {})
    return limits.max_time_problems(values, _limit_key(plan), plan.job.resources.time_limit)


def _limit_key(plan: Plan) -> str:
    return f"{plan.job.stage}.run.time_limit"


def key_problems(plan: Plan, facts: Facts) -> Iterable[Finding]:
    return names.key_problems(Values(plan.job.config or {}), facts)
