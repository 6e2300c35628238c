"""The machine that launches and the scheduler's own answer: what no launch goes past."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.facts import Facts, Interpreter
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.estimates.parallelism import NODES
from launcher.plan import Plan

MACHINE = "machine"
SCHEDULER = "scheduler"

_PYTHON = "cluster.python"


def machine_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find what a launch lacks on this machine: an interpreter with its libraries, an allocation."""
    host, container = facts.host, plan.job.container
    if host is None:
        return
    if container is not None and plan.scheduler == "local":
        message = "not used: cluster.scheduler=local runs without containers"
        yield warning(MACHINE, "container", container.image, message)
    if host.interpreter is not None:
        yield from _interpreter_problems(plan, host.interpreter)
    if plan.scheduler != "allocation":
        return
    nodes = plan.job.resources.nodes
    fix = f"salloc --nodes={nodes} --ntasks-per-node={plan.job.resources.tasks_per_node}"
    if not host.in_allocation:
        yield error(MACHINE, "cluster.scheduler", "allocation", "this shell is in no allocation", fix)
    elif host.allocation_nodes is not None and host.allocation_nodes < nodes:
        message = f"the allocation that this shell is in has {host.allocation_nodes}"
        yield error(MACHINE, NODES, nodes, message, fix)


# By stage: the libraries in words, the work that needs them, and the extra that has them.
_NEEDS = {"data_preparation": ("numpy and tokenizers", "a data preparation", "data")}
_OF_TRAININGS = ("torch and megatron-core", "a training", "train")


def _interpreter_problems(plan: Plan, python: Interpreter) -> Iterator[Finding]:
    libraries, work, extra = _NEEDS.get(plan.job.stage, _OF_TRAININGS)
    name = None if python.is_own else python.name
    if python.problem is not None:
        yield error(MACHINE, _PYTHON, name, python.problem, python.nearest)
    elif python.path is None:
        yield warning(MACHINE, _PYTHON, name, "not on this machine; every node must have it")
    elif python.missing is None:
        yield warning(MACHINE, _PYTHON, name, f"it does not say whether it has {libraries}")
    elif python.missing:
        who = "the launcher's own interpreter" if python.is_own else "it"
        yield error(
            MACHINE,
            _PYTHON,
            name,
            f"{who} does not find {', '.join(python.missing)}",
            f"install what {work} needs there: {python.path} -m pip install 'PATH[{extra}]', where PATH is"
            " Slipway's checkout or wheel\n"
            "or name another interpreter, cluster.python=..., or an image, container=...",
        )


def submission_problems(facts: Facts) -> Iterator[Finding]:
    """Repeat what the scheduler says of the script, in its own words."""
    answer = facts.submission
    if answer is None or answer.message is None:
        return
    severity = Severity.ERROR if answer.is_refused else Severity.WARNING
    yield Finding(SCHEDULER, severity, None, answer.message, answer.fix)
