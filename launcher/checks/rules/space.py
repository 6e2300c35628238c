"""The space for checkpoints and converted models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.checks.facts import PathFacts
from launcher.checks.findings import Finding, check, error, warning
from launcher.estimates.cost import KEEP, Checkpoints, checkpoints_of
from launcher.estimates.training import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan

_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"
_ELSEWHERE = "base_results_dir=... where there is more space"


@check(
    "space.checkpoints",
    "there is space for the next checkpoint, and for all that are kept",
    "paths.free_bytes",
)
def checkpoint_problems(plan: Plan, paths: PathFacts) -> Iterator[Finding]:
    """Find too little space for the next checkpoint, or for all that are kept.

    Those that the run has already have their space.
    """
    values, free = Values(plan.job.config or {}), paths.free_bytes or 0
    model = model_size(values)
    saved = checkpoints_of(values, model, plan.job.engine) if model is not None else None
    if saved is None:
        return
    there = paths.checkpoints_there or 0
    more, size = max(1, saved.most - there), bytes_text(saved.size)
    if saved.size > free:
        # A disk of a laptop is not the one that the nodes of the job write to.
        report, whose = (warning, " of this machine's own disk") if paths.is_own_disk else (error, "")
        text = f"a checkpoint takes about {size}, and {_free(paths)}{whose}"
        yield report(_DIRECTORY, values.raw(_DIRECTORY), text, _ELSEWHERE)
    elif more * saved.size > free:
        need = f"{count(more, 'more checkpoint' if there else 'checkpoint')} of about {size} take"
        room = free // saved.size
        text = f"{need} {bytes_text(more * saved.size)}, and {_free(paths)}: enough for {room}"
        fix = _keep_fewer(saved, there + room, plan.job.engine)
        yield warning(KEEP, values.raw(KEEP), text, fix, also=(_DIRECTORY,))


def _free(paths: PathFacts) -> str:
    by_quota = " (by the quota)" if paths.free_by == "quota" else ""
    return f"{bytes_text(paths.free_bytes or 0)} are free{by_quota}"


def _keep_fewer(saved: Checkpoints, room: int, engine: str) -> str:
    if engine == "megatron_lm":
        return f"fewer: Megatron-LM keeps them all; or {_ELSEWHERE}"
    kept = room - saved.beside
    return f"{full(KEEP)}={kept}, or {_ELSEWHERE}" if kept > 0 else _ELSEWHERE


@check("space.output", "there is space for a converted model", "paths.free_bytes")
def conversion_problems(plan: Plan, paths: PathFacts) -> Iterator[Finding]:
    node = (plan.job.stage_config or {}).get("conversion")
    if node is None or not isinstance(node["model"], Mapping):
        return
    model = model_size(Values({"model": node["model"], "run": {"model_type": node["model_type"]}}))
    size = model.parameters * (4 if node["dtype"] in (None, "float32") else 2) if model is not None else 0
    if size > (paths.free_bytes or 0):
        text = f"the converted model takes about {bytes_text(size)}, and {_free(paths)}"
        fix = "conversion.output=... where there is more space, or conversion.dtype=bfloat16"
        yield error("conversion.output", node["output"], text, fix)


def bytes_text(size: int) -> str:
    """Format a size as disks are sold, in powers of ten."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}" if size < 1000 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return f"{size} bytes"


CHECKS = (checkpoint_problems, conversion_problems)
