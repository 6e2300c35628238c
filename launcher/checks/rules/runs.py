"""The run that a launch belongs to: its earlier training and data, and other runs with its job's name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from launcher.checks.facts import Change, Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.errors import one_line, shown
from launcher.estimates.parallelism import PIPELINE, TENSOR, VIRTUAL
from launcher.estimates.values import Values, full
from launcher.plan import Plan

_RUN = "training.run.name"
_LOAD = "resume.load_optimizer"
_ACCEPT = "training.resume.accept_data"
# So many keys are told; the manifest has them all.
_TOLD = 8
_RUNS_SHOWN = 3
_ELSEWHERE = (
    f"a training of its own: {_RUN}=..., or unique_output_dir=true\n"
    "to go on with this one: the values that it has had"
)


def training_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Warn of another rate, seed, data or batch; refuse another model or tokenizer for the checkpoints."""
    earlier = facts.earlier
    if earlier is None or not earlier.changes:
        return
    grave = [change for change in earlier.changes if change.is_grave]
    if grave and earlier.goes_on:
        text = f"launch {earlier.launch} of this run trains another model or tokenizer: {_told(grave)}"
        yield error("run.training", _RUN, plan.paths.run_name, text, _ELSEWHERE, _keys(grave))
        return
    text = f"launch {earlier.launch} of this run was another training: {_told(earlier.changes)}"
    if earlier.goes_on:
        text += "; this one goes on from its checkpoints"
    yield warning("run.training", _RUN, plan.paths.run_name, text, _ELSEWHERE, _keys(earlier.changes))


def data_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find files that changed their content since the training read them, unless the user accepts that."""
    earlier = facts.earlier
    if earlier is None or not earlier.data or not earlier.goes_on:
        return
    files = "; ".join(earlier.data)
    if earlier.accept is not None and earlier.accepted == earlier.accept:
        text = f"accepted are other data than those of {earlier.data_since}: {files}"
        yield warning("data.identity", _ACCEPT, earlier.accepted, text)
        return
    text = f"{earlier.data_since} was trained on other data: {files}"
    accept = f"{_ACCEPT}={earlier.accept}"
    fix = f"put the files back\nto go on with the new ones: {accept}\nor a training of its own: {_RUN}=..."
    yield error("data.identity", _ACCEPT, earlier.accepted, text, fix)


def shard_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find parallel sizes under which the checkpoint's optimizer states cannot be loaded.

    Source: trainer/checkpoint/compatible.py. The number of data- and context-parallel ranks may differ.
    """
    shards = facts.earlier.shards if facts.earlier is not None else None
    if shards is None:
        return
    values = Values(plan.job.config or {})
    sizes = {TENSOR: shards.tensor, PIPELINE: shards.pipeline, VIRTUAL: shards.virtual}
    for key, saved in sizes.items():
        size = values.whole(key) or 1
        if size == saved:
            continue
        name = shards.checkpoint.rpartition("/")[2]
        text = f"the optimizer states of the checkpoint {name} are in shards of {saved}"
        fix = (
            f"a copy for all sizes: python -m trainer.checkpoint.reshard {shlex.quote(shards.checkpoint)}\n"
            f"{full(key)}={saved}\nthe weights alone: {full(_LOAD)}=False"
        )
        yield error("run.shards", full(key), size, text, fix)


def _told(changes: Sequence[Change]) -> str:
    text = [f"{full(change.key)} {shown(change.old)} → {shown(change.new)}" for change in changes[:_TOLD]]
    more = f", and {len(changes) - _TOLD} more" if len(changes) > _TOLD else ""
    return f"{', '.join(text)}{more}"


def _keys(changes: Sequence[Change]) -> list[str]:
    return [change.key for change in changes[:_TOLD]]


def singleton_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find other runs with the same job name: Slurm's `singleton` looks at the name and the user alone."""
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
