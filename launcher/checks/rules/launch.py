"""Check the preconditions of every launch: this machine, and the scheduler's verdict on the script."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.facts import Facts, HostFacts, Interpreter
from launcher.checks.findings import Finding, Severity, check, error, warning
from launcher.checks.rules.cluster import ACCOUNT, PARTITION, QOS
from launcher.errors import did_you_mean
from launcher.estimates.parallelism import NODES
from launcher.plan import Plan
from slipway.common.extras import install_command

MACHINE = "machine"
SCHEDULER = "scheduler"

_PYTHON = "cluster.python"

# By stage: the modules that its tasks import, the main ones in words, the work, and the extra that has them.
LIBRARIES = {
    "training": ("torch megatron numpy psutil yaml", "torch and megatron-core", "a training", "train"),
    "data_preparation": ("numpy tokenizers yaml", "numpy and tokenizers", "a data preparation", "data"),
    "conversion": (
        *("torch numpy safetensors yaml", "torch and safetensors"),
        *("a conversion", "train,conversion"),
    ),
    "evaluation": (
        *("torch megatron numpy psutil yaml", "torch and megatron-core"),
        *("an evaluation", "train,evaluation"),
    ),
}


@check(
    MACHINE,
    "this machine has what a launch needs: an interpreter with the trainer's libraries, an allocation",
    "host.in_allocation",
)
def machine_problems(plan: Plan, host: HostFacts) -> Iterator[Finding]:
    container, resources = plan.job.container, plan.job.resources
    if container is not None and plan.scheduler == "local":
        text = "not used: cluster.scheduler=local runs without containers"
        yield warning("container", container.image, text)
    if host.interpreter is not None:
        yield from _interpreter_problems(plan, host.interpreter)
    if plan.scheduler != "allocation":
        return
    fix = f"salloc --nodes={resources.nodes} --ntasks-per-node={resources.tasks_per_node}"
    if not host.in_allocation:
        yield error("cluster.scheduler", "allocation", "this shell is in no allocation", fix)
    elif host.is_heterogeneous:
        text = "a run is one step, and the allocation is heterogeneous (of a salloc with ' : ')"
        yield error("cluster.scheduler", "allocation", text, fix)
    elif host.allocation_nodes is not None and host.allocation_nodes < resources.nodes:
        text = f"the allocation that this shell is in has {host.allocation_nodes}"
        yield error(NODES, resources.nodes, text, fix)


def _interpreter_problems(plan: Plan, python: Interpreter) -> Iterator[Finding]:
    _, libraries, work, extra = LIBRARIES[plan.job.stage]
    name = None if python.is_own else python.name
    if python.problem is not None:
        yield error(_PYTHON, name, python.problem, python.nearest)
    elif python.path is None:
        yield warning(_PYTHON, name, "not on this machine; every node must have it")
    elif python.missing is None:
        yield warning(_PYTHON, name, f"could not determine whether this interpreter has {libraries}")
    elif python.missing:
        who = "the launcher's own interpreter" if python.is_own else "this interpreter"
        fix = (
            f"install the libraries of {work} there: {install_command(extra, python.path)}\n"
            "or name another interpreter, cluster.python=..., or an image, container=..."
        )
        text, report = f"{who} cannot import {', '.join(python.missing)}", error
        if python.changed_by is not None:
            text, report = f"{text} on this machine; {python.changed_by} may add it on the nodes", warning
        yield report(_PYTHON, name, text, fix)


# Slurm's messages on names that only Slurm judges (src/common/slurm_errno.c), and their keys.
_REFUSALS = {
    "Invalid account": ACCOUNT,
    "Job's account not permitted": ACCOUNT,
    "Invalid qos": QOS,
    "Job's QOS not permitted": QOS,
    "User's group not permitted": PARTITION,
    "Invalid license": "cluster.licenses",
    "equested reservation": "cluster.reservation",
}


@check(SCHEDULER, "Slurm takes the script, by `sbatch --test-only`", "submission.is_refused")
def submission_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Report the scheduler's answer to the script in its words, with the key that it concerns."""
    submission = facts.submission
    assert submission is not None
    if submission.refusal is not None:
        yield _refusal(plan, facts, submission.refusal, submission.fix)
    notice = f"sbatch says of this job: {submission.notice}" if submission.notice else None
    for text in filter(None, (submission.waits, notice)):
        yield Finding(Severity.WARNING, None, text)


def _refusal(plan: Plan, facts: Facts, text: str, fix: str | None) -> Finding:
    key = next((key for sentence, key in _REFUSALS.items() if sentence in text), None)
    if key is None:
        return Finding(Severity.ERROR, None, text, fix)
    value = getattr(plan.job.queue, key.partition(".")[2])
    associations = (facts.cluster.associations if facts.cluster is not None else None) or ()
    names = {
        ACCOUNT: {mine.account for mine in associations},
        QOS: {name for mine in associations for name in mine.qos},
    }
    return error(key, value, text, fix or did_you_mean(value or "", names.get(key, ())))


CHECKS = (machine_problems, submission_problems)
