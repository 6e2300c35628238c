"""The run that a launch belongs to: its earlier training, its time limit, and what keeps its chain going."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.checks.facts import Change, Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.errors import one_line, shown
from launcher.estimates.cost import Cost, estimate_cost
from launcher.estimates.model import model_size
from launcher.estimates.parallelism import PIPELINE, TENSOR, VIRTUAL
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan
from launcher.slurm.notations import TIME_FORMS, format_days, margin_of, parse_time_limit

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


# --- times and chains

# Lightning's trainer.max_time adds up over the launches of a run, exp_manager's is of this one.
_MAX_TIMES = ("trainer.max_time", "exp_manager.max_time_per_run")
_DURATION = re.compile(":".join([r"(\d{1,9})"] * 4), re.ASCII)

_DAY = 24 * 3600
_LONGEST = 365 * _DAY
_LINKS = "resilience.links"
_STEPS = "trainer.max_steps"
_SAVE = "resilience.save_before_end"
_SIGNAL = re.compile(r"(?:R?B?:)?(?:SIG)?\w+@(\d+)", re.ASCII)
# Without these a next job would begin anew.
_NEEDED = ("exp_manager.resume_if_exists", "exp_manager.create_checkpoint_callback")


def limit_problems(plan: Plan) -> Iterator[Finding]:
    """Find a time limit that Slurm does not read."""
    key, limit = _limit_of(plan)
    if limit is not None and _is_unreadable(limit):
        yield error("time.limit", key, limit, "not a time limit", f"valid: {TIME_FORMS}")


def _limit_of(plan: Plan) -> tuple[str, str | None]:
    return f"{plan.job.stage}.run.time_limit", plan.job.resources.time_limit


def _is_unreadable(limit: str) -> bool:
    try:
        parse_time_limit(limit)
    except ValueError:
        return True
    return False


def max_time_problems(plan: Plan) -> Iterator[Finding]:
    """Find a training that does not end, and save, before Slurm ends its job.

    The first of the two times counts: `trainer.max_time` may well be that of a whole chain of jobs.
    """
    values, (key, limit) = Values(plan.job.config or {}), _limit_of(plan)
    times = {}
    for name in _MAX_TIMES:
        given = values.raw(name)
        if given is None:
            continue
        time = _max_time_seconds(given)
        if time is None:
            expected = "days:hours:minutes:seconds in quotes, such as '00:03:30:00'"
            yield error("time.max_time", _as_written(values, name), given, f"expected {expected}")
        else:
            times[name] = time
    ends = parse_time_limit(limit) if limit is not None and not _is_unreadable(limit) else None
    if not times or ends is None or min(times.values()) < ends:
        return
    first = min(times, key=lambda name: times[name])
    text = f"not before the job's time limit, {limit}: the job would end without a last checkpoint"
    fix = f"'{format_days(max(1, ends - margin_of(ends)))}' or less, or a longer {key}"
    yield warning("time.max_time", _as_written(values, first), values.raw(first), text, fix, also=(key,))


def _as_written(values: Values, name: str) -> str:
    """Return the key that a time is from: for NeMo, a launch's configuration has it in the other place."""
    trainers, launches = _MAX_TIMES
    return trainers if name == launches and values.raw(trainers) is None else name


def _max_time_seconds(value: Any) -> int | None:
    """Read Lightning's DD:HH:MM:SS; YAML reads an unquoted one with two parts as a number."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def length_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a chain that is shorter than the training, or a training that is longer than a year.

    Without a chain nothing is said of the limit: many a run goes on with its user's next launch.
    """
    cost = estimate_cost(plan, facts.gpu_types)
    if cost is None:
        yield from _not_told(plan)
        return
    limit_key, links = f"{plan.job.stage}.run.time_limit", plan.job.chain.links
    if cost.links is not None and 1 < links < cost.links:
        yield warning(
            "time.training",
            _LINKS,
            links,
            f"{count(links, 'job')} of {plan.job.resources.time_limit} end before the training does:"
            f" {_length(cost)}, which is {count(cost.links, 'job')}",
            f"{_LINKS}={cost.links}, a longer {limit_key}, or more nodes",
            also=(limit_key, _STEPS),
        )
    if cost.seconds > _LONGEST:
        yield warning(
            "time.training",
            _STEPS,
            cost.steps,
            f"more than a year: {_length(cost)} for {cost.tokens:,} tokens",
            "fewer steps, or more nodes; estimates.mfu=... where it is known better",
            also=("trainer.num_nodes",),
        )


def _not_told(plan: Plan) -> Iterator[Finding]:
    """Say that nothing is modelled of how fast experts are, where the rest of the estimate is there."""
    values = Values(plan.job.config or {})
    model = model_size(values)
    if model is None or not model.has_experts or not values.whole(_STEPS) or plan.assumptions.mfu is not None:
        return
    key = "model.num_moe_experts"
    why = f"{full(key)}={values.raw(key)}: how long experts take is not modelled: estimates.mfu=... says it"
    text = f"not checked: how long the training takes ({why})"
    yield Finding("time.training", Severity.SKIPPED, None, text, why=why)


def _length(cost: Cost) -> str:
    return f"about {told_days(cost.seconds)} on {count(cost.gpus, 'GPU')} at MFU {cost.mfu:.2f}"


def told_days(seconds: float) -> str:
    """Format a duration: in days, in hours below two days, or in minutes."""
    if seconds < 5400:
        return f"{seconds / 60:.1f} minutes"
    if seconds < 2 * _DAY:
        return f"{seconds / 3600:.1f} hours"
    days = seconds / _DAY
    return f"{days:,.0f} days" if days >= 100 else f"{days:.1f} days"


def requeue_problems(plan: Plan) -> Iterator[Finding]:
    """Find a chain that Slurm requeues too: which job is the next would be ambiguous."""
    queue, links = plan.job.queue, plan.job.chain.links
    by_flag = "requeue" in queue.further
    if links == 1 or (queue.requeue is False and not by_flag):
        return
    key, fix = ("cluster.sbatch.requeue", "null") if by_flag else ("cluster.requeue", "False")
    given = True if by_flag else queue.requeue
    text = (
        "whatever the site's default is" if given is None else "Slurm would start a job again that it ended"
    )
    yield error(
        "chain.requeue",
        key,
        given,
        f"{text}, and so does the chain of {links} jobs: there can be one of them",
        f"{key}={fix}, or {_LINKS}=1",
        also=(_LINKS,),
    )


def dependency_problems(plan: Plan) -> Iterator[Finding]:
    """Find alternatives in the dependency of a chain, whose next job must wait for the one before it."""
    dependency, key = plan.job.queue.dependency, f"{plan.job.stage}.run.dependency"
    if plan.job.chain.links > 1 and dependency is not None and "?" in dependency:
        text = "alternatives (?) cannot be waited for together with the job before in a chain"
        yield error("chain.dependency", key, dependency, text, f"{key}=singleton", also=(_LINKS,))


def resume_problems(plan: Plan) -> Iterator[Finding]:
    """Find a chain whose jobs do not resume from the last one's checkpoint."""
    values = Values(plan.job.config or {})
    if plan.job.chain.links == 1:
        return
    for key in _NEEDED:
        if values.raw(key) is False:
            text = f"each of the {plan.job.chain.links} jobs of the chain would begin anew"
            yield error("chain.resume", key, False, text, f"True, or {_LINKS}=1", also=(_LINKS,))


def save_problems(plan: Plan) -> Iterator[Finding]:
    """Find a job that is not told to save before its limit, or is told as soon as it begins."""
    limit_key, given = f"{plan.job.stage}.run.time_limit", plan.job.resources.time_limit
    limit, signal = _limit_seconds(given), plan.job.queue.signal
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


def _limit_seconds(limit: str | None) -> int | None:
    try:
        return parse_time_limit(limit) if limit is not None else None
    except ValueError:
        return None  # time.limit tells
