"""The training that a run's name stands for already, held against the one that is launched under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.checks.facts import Change, Facts
from launcher.checks.findings import Finding, error, warning
from launcher.errors import shown
from launcher.estimates.values import full
from launcher.plan import Plan

_RUN = "training.run.name"
_ACCEPT = "training.resume.accept_data"
# So many keys are told; the manifest has them all.
_TOLD = 8
_ELSEWHERE = (
    f"a training of its own: {_RUN}=..., or unique_output_dir=true\n"
    "to go on with this one: the values that it has had"
)


def training_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Another rate, seed, data or batch is told; another model or tokenizer does not fit the checkpoints."""
    earlier = facts.earlier
    if earlier is None or not earlier.changes:
        return
    grave = [change for change in earlier.changes if change.is_grave]
    if grave and earlier.goes_on:
        told = f"launch {earlier.launch} of this run trains another model or tokenizer: {_told(grave)}"
        yield error("run.training", _RUN, plan.paths.run_name, told, _ELSEWHERE, _keys(grave))
        return
    told = f"launch {earlier.launch} of this run was another training: {_told(earlier.changes)}"
    if earlier.goes_on:
        told += "; this one goes on from its checkpoints"
    yield warning("run.training", _RUN, plan.paths.run_name, told, _ELSEWHERE, _keys(earlier.changes))


def data_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Files of the same name have the content that the training has seen, unless the user accepts another."""
    earlier = facts.earlier
    if earlier is None or not earlier.data or not earlier.goes_on:
        return
    files = "; ".join(earlier.data)
    if earlier.accept is not None and earlier.accepted == earlier.accept:
        told = f"accepted are other data than those of {earlier.data_since}: {files}"
        yield warning("data.identity", _ACCEPT, earlier.accepted, told)
        return
    told = f"{earlier.data_since} was trained on other data: {files}"
    accept = f"{_ACCEPT}={earlier.accept}"
    fix = f"put the files back\nto go on with the new ones: {accept}\nor a training of its own: {_RUN}=..."
    yield error("data.identity", _ACCEPT, earlier.accepted, told, fix)


def _told(changes: Sequence[Change]) -> str:
    told = [f"{full(change.key)} {shown(change.old)} → {shown(change.new)}" for change in changes[:_TOLD]]
    more = f", and {len(changes) - _TOLD} more" if len(changes) > _TOLD else ""
    return f"{', '.join(told)}{more}"


def _keys(changes: Sequence[Change]) -> list[str]:
    return [change.key for change in changes[:_TOLD]]
