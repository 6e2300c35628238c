"""Checkpoints, and the space that is left for them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.estimates.checkpoints import KEEP, Checkpoints, checkpoints_of
from launcher.estimates.model import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan

_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"


def checkpoint_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """There is space for the next checkpoint, and for all that are kept.

    Those that the run has already have their space.
    """
    paths, values = facts.paths, Values(plan.job.config or {})
    free = paths.free_bytes if paths is not None else None
    model = model_size(values)
    saved = checkpoints_of(values, model, plan.job.engine) if model is not None else None
    if free is None or saved is None:
        return
    there = (paths.checkpoints_there if paths is not None else None) or 0
    more = max(1, saved.most - there)
    left = f"{told_bytes(free)} are free" + (" (by the quota)" if paths and paths.free_by == "quota" else "")
    if saved.size > free:
        tell, whose = (warning, " of this machine's own disk") if _is_own_disk(plan, facts) else (error, "")
        yield tell(
            "space.checkpoints",
            _DIRECTORY,
            values.raw(_DIRECTORY),
            f"a checkpoint takes about {told_bytes(saved.size)}, and {left}{whose}",
            "base_results_dir=... where there is more space",
        )
    elif more * saved.size > free:
        yield warning(
            "space.checkpoints",
            KEEP,
            values.raw(KEEP),
            f"{count(more, 'more checkpoint' if there else 'checkpoint')} of about {told_bytes(saved.size)}"
            f" take {told_bytes(more * saved.size)}, and {left}: enough for"
            f" {free // saved.size}",
            _fix(saved, there + free // saved.size, plan.job.engine),
            also=(_DIRECTORY,),
        )


def _is_own_disk(plan: Plan, facts: Facts) -> bool:
    """Return True if the nodes of the job cannot write to the disk that was looked at, as on a laptop."""
    local = facts.paths.local if facts.paths is not None else None
    return local is not None and bool(local.results) and max(plan.job.resources.node_counts) > 1


def _fix(saved: Checkpoints, room: int, engine: str) -> str:
    elsewhere = "base_results_dir=... where there is more space"
    if engine == "megatron_lm":
        return f"fewer: Megatron-LM keeps them all; or {elsewhere}"
    beside = saved.beside
    return f"{full(KEEP)}={room - beside}, or {elsewhere}" if room > beside else elsewhere


def told_bytes(size: int) -> str:
    """A size as disks are sold, in powers of ten."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}" if size < 1000 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return f"{size} bytes"
