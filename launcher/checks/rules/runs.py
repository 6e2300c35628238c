"""Check a launch's run: its supervisor, its earlier training, its time limit and its chain."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launcher.checks.facts import Change, EarlierTraining, ExcludeFile, Facts
from launcher.checks.findings import Finding, Severity, check, error, skip_check, warning
from launcher.errors import escape, literal
from launcher.estimates.cost import Cost, estimate_cost
from launcher.estimates.parallelism import NODES, PIPELINE, TENSOR, VIRTUAL
from launcher.estimates.training import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan
from launcher.slurm.notations import TIME_FORMS, format_days, limit_seconds, margin_of, parse_time_limit

_RUN = "training.run.name"
_ACCEPT = "training.resume.accept_data"
# The most keys in a message; the manifest has them all.
_SHOWN = 8
_RUNS_SHOWN = 3
_ELSEWHERE = (
    f"to start a separate run: {_RUN}=..., or unique_output_dir=true\n"
    "to continue this run: restore the previous values"
)
_SEPARATE = _ELSEWHERE.partition("\n")[0]


@check("job.python", "the job's supervisor has a Python, 3.6.2 or newer", "supervisor_python")
def python_problems(plan: Plan, supervisor_python: str) -> Iterator[Finding]:
    """Check that the supervisor of a job has its Python, on this machine or on nodes like it."""
    key, scheduler = "cluster.scheduler", plan.scheduler
    if supervisor_python and scheduler == "local":
        fix = "install Python 3.6.2 or newer as /usr/bin/python3"
        yield error(key, scheduler, f"{supervisor_python}: the job would end at once", fix)
    elif supervisor_python:
        text = f"{supervisor_python}; on nodes that are like it the job would end at once"
        yield warning(key, scheduler, text, "ask the nodes: slipway doctor --nodes")


@check(
    "run.training",
    "the run's checkpoints are of this training, and not of another one with its name",
    "earlier.changes",
)
def training_problems(plan: Plan, earlier: EarlierTraining) -> Iterator[Finding]:
    """Warn of another rate, seed, data or batch; refuse another model or tokenizer for the checkpoints."""
    changes = earlier.changes or ()
    grave = [change for change in changes if change.is_grave]
    launch = f"launch {earlier.launch} of this run"
    if grave and earlier.goes_on:
        text = f"{launch} trains another model or tokenizer: {_changes_text(grave)}"
        yield error(_RUN, plan.paths.run_name, text, _ELSEWHERE, _keys(grave))
    elif changes:
        text = f"{launch} had other settings: {_changes_text(changes)}"
        if earlier.goes_on:
            text += "; this launch continues from its checkpoints"
        yield warning(
            _RUN, plan.paths.run_name, text, f"{_ELSEWHERE}{_suggest_weights(plan, changes)}", _keys(changes)
        )
    if earlier.abandoned is not None:
        text = f"the NeMo launcher saved this run in {earlier.abandoned}, where this launch does not look"
        fix = f"mv -T {earlier.abandoned} {plan.paths.checkpoints}, to go on from there\n{_SEPARATE}"
        yield error(_RUN, plan.paths.run_name, text, fix)
    last = Values(plan.job.config or {}).whole(_STEPS)
    if earlier.goes_on and earlier.saved is not None and last is not None and earlier.saved >= last:
        text = f"nothing left to do: the run has a checkpoint of step {earlier.saved} already"
        yield warning(_STEPS, last, text, f"to continue: {full(_STEPS)}=... above {earlier.saved}")
    yield from _warn_moved_schedule(plan, earlier)


def _suggest_weights(plan: Plan, changes: Sequence[Change]) -> str:
    """Return the key that changes the mixture of our trainer's data without repeating samples, if unset."""
    weights, values = "resume.data_weights", Values(plan.job.config or {})
    is_mixed = any(change.key.startswith("model.data.data_prefix") for change in changes)
    if not is_mixed or plan.job.engine != "megatron" or values.raw(weights):
        return ""
    return f"\nto change the mixture and repeat no sample: {full(weights)}=[[SAMPLE, [WEIGHT, ...]]]"


def _warn_moved_schedule(plan: Plan, earlier: EarlierTraining) -> Iterator[Finding]:
    """Warn of another `trainer.max_steps` that moves the learning rate, or the order of the data.

    NeMo restores its schedule with its steps. megatron-core shuffles the epochs of a whole training together
    (gpt_dataset.py), and computes their number from the steps; our trainer's order has no end.
    """
    if earlier.steps is None:
        return
    text, fix = [], None
    if earlier.rate is not None and plan.job.engine != "nemo":
        step, before, now = earlier.rate
        text.append(f"it changes the learning rate of step {step} from {before:.2g} to {now:.2g}")
        fix = f"to keep it: +{full('model.optim.sched.max_steps')}={earlier.steps[0]}"
    if plan.job.engine != "megatron":
        text.append("megatron-core orders data that are read more than once by the number of epochs")
    if text:
        why = f"launch {earlier.launch} of this run had {earlier.steps[0]}: {'; '.join(text)}"
        yield warning(_STEPS, earlier.steps[1], why, fix)


def _changes_text(changes: Sequence[Change]) -> str:
    text = [f"{full(item.key)} {literal(item.old)} → {literal(item.new)}" for item in changes[:_SHOWN]]
    more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return f"{', '.join(text)}{more}"


def _keys(changes: Sequence[Change]) -> list[str]:
    return [change.key for change in changes[:_SHOWN]]


@check("data.identity", "the data are those that the run was trained on", "earlier.data")
def data_problems(earlier: EarlierTraining) -> Iterator[Finding]:
    """Find files that changed their content since the training read them, unless the user accepts that."""
    if not earlier.data or not earlier.goes_on:
        return
    files = "; ".join(earlier.data)
    if earlier.accept is not None and earlier.accept in (earlier.accepted or "").split("+"):
        text = f"you accepted data that differ from those of {earlier.data_since}: {files}"
        yield warning(_ACCEPT, earlier.accepted, text)
        return
    text = f"{earlier.data_since} was trained on other data: {files}"
    accept = f"{_ACCEPT}={earlier.accept}"
    fix = f"put the files back\nto continue with the new ones: {accept}\nto start a separate run: {_RUN}=..."
    yield error(_ACCEPT, earlier.accepted, text, fix)


@check(
    "run.shards",
    "the checkpoint's optimizer states can be loaded by these tensor and pipeline parallel sizes",
    "earlier.goes_on",
)
def shard_problems(plan: Plan, earlier: EarlierTraining) -> Iterator[Finding]:
    """Find parallel sizes under which the checkpoint's optimizer states cannot be loaded.

    Source: slipway/trainer/checkpoint/compatible.py. The number of data- and context-parallel ranks may
    differ.
    """
    shards, values = earlier.shards, Values(plan.job.config or {})
    if shards is None:
        return
    for key, saved in {TENSOR: shards.tensor, PIPELINE: shards.pipeline, VIRTUAL: shards.virtual}.items():
        size = values.whole(key) or 1
        if size != saved:
            name = shards.checkpoint.rpartition("/")[2]
            text = f"the optimizer states of the checkpoint {name} are in shards of {saved}"
            copy = f"python -m slipway.trainer.checkpoint.reshard {shlex.quote(shards.checkpoint)}"
            fix = (
                f"a copy for all sizes: {copy}\n"
                f"{full(key)}={saved}\nthe weights alone: {full('resume.load_optimizer')}=False"
            )
            yield error(key, size, text, fix)


@check(
    "run.order",
    "an intervention changes the order of the samples after its checkpoint alone",
    "earlier.goes_on",
)
def order_problems(plan: Plan, earlier: EarlierTraining) -> Iterator[Finding]:
    """Find changes to the samples that the checkpoint was trained on.

    Source: slipway/trainer/checkpoint/compatible.py.
    """
    past, values = earlier.rewritten, Values(plan.job.config or {})
    if past is not None:
        text = f"{past.checkpoint} was trained up to sample {past.consumed} with {past.recorded}"
        fix = f"keep that, and begin at this sample or later\nto go back: {full('resume.checkpoint')}=..."
        yield error(past.key, values.raw(past.key), f"the checkpoint {text}", fix)


@check("run.singleton", "no other run's jobs have the same name, to wait for each other", "same_job_name")
def singleton_problems(plan: Plan, same_job_name: Sequence[str]) -> Iterator[Finding]:
    """Find other runs with the same job name: Slurm's `singleton` looks at the name and the user alone."""
    dependency, stage = plan.job.queue.dependency, plan.job.stage
    if not same_job_name or dependency is None or "singleton" not in dependency:
        return
    named = escape(", ".join(same_job_name[:_RUNS_SHOWN]))
    named += ", ..." if len(same_job_name) > _RUNS_SHOWN else ""
    key, waits = f"{stage}.run.name", f"{stage}.run.dependency"
    text = f"jobs of {named} are called {plan.paths.job_name} too, and dependency={dependency} makes them"
    fix = f"{key}=..., another cluster.job_name_prefix, or {waits}=null"
    message = f"{key}={plan.paths.run_name}: {text} wait for each other"
    yield Finding(Severity.WARNING, key, message, fix, (waits,))


# --- times and chains

# Lightning's trainer.max_time adds up over the launches of a run, exp_manager's is of this one.
_MAX_TIMES = ("trainer.max_time", "exp_manager.max_time_per_run")
_DURATION = re.compile(":".join([r"(\d{1,9})"] * 4), re.ASCII)

_DAY = 24 * 3600
_LONGEST = 365 * _DAY
_LINKS, _RESTARTS = "resilience.links", "resilience.restarts"
_STEPS = "trainer.max_steps"
_SAVE = "resilience.save_before_end"
_SIGNAL = re.compile(r"(?:R?B?:)?(?:SIG)?\w+@(\d+)", re.ASCII)
# Signals at which a training saves; the supervisor (B) only notes TERM, which Slurm also sends to the tasks.
_SAVES = re.compile(
    r"(?:[RB]*:)?(?:(?:SIG)?USR1|10)(?:@.*)?|(?:R:)?(?:(?:SIG)?TERM|15)(?:@.*)?", re.IGNORECASE
)
# Without these a next job would begin anew.
_NEEDED = ("exp_manager.resume_if_exists", "exp_manager.create_checkpoint_callback")


def limit_key(plan: Plan) -> str:
    return f"{plan.job.stage}.run.time_limit"


@check(
    "run.exclude_file",
    "the team's file of nodes to avoid can be read; the nodes that it leaves out",
    "exclude_file.nodes",  # not applicable to a job without one
)
def exclude_file_problems(facts: Facts, exclude_file: ExcludeFile) -> Iterator[Finding]:
    """Find an unreadable file; name the nodes of a readable one, also those that the cluster lacks."""
    key = "resilience.exclude_file"
    if exclude_file.problem is not None:
        yield error(key, exclude_file.path, exclude_file.problem, exclude_file.fix)
        return
    left_out = facts.shared_exclusions
    passed_over = [excluded.node for excluded in exclude_file.nodes if excluded not in left_out]
    texts = [f"leaves out {', '.join(f'{node.node} ({node.why})' for node in left_out)}"] * bool(left_out)
    if passed_over:
        texts.append(f"passes over {', '.join(passed_over)}, not among the nodes to choose from")
    if texts:
        yield replace(error(key, exclude_file.path, "; ".join(texts)), severity=Severity.OK)


@check("time.limit", "the time limit is in one of Slurm's forms")
def limit_problems(plan: Plan) -> Iterator[Finding]:
    limit = plan.job.resources.time_limit
    if limit is None:
        return
    try:
        parse_time_limit(limit)
    except ValueError:
        yield error(limit_key(plan), limit, "not a time limit", f"valid: {TIME_FORMS}")


@check("time.max_time", "training ends, and saves, before its job does")
def max_time_problems(values: Values, plan: Plan) -> Iterator[Finding]:
    """Find a training that does not end, and save, before Slurm ends its job.

    The first of the two times counts: `trainer.max_time` may well be that of a whole chain of jobs.
    """
    written = {name: values.raw(name) for name in _MAX_TIMES if values.raw(name) is not None}
    times = {name: time for name, value in written.items() if (time := _max_time_seconds(value)) is not None}
    for name in (name for name in written if name not in times):
        expected = "days:hours:minutes:seconds in quotes, such as '00:03:30:00'"
        yield error(_find_written_key(values, name), written[name], f"expected {expected}")
    ends, key = limit_seconds(plan.job.resources.time_limit), limit_key(plan)
    if not times or ends is None or min(times.values()) < ends:
        return
    first, limit = min(times, key=lambda name: times[name]), plan.job.resources.time_limit
    text = f"not before the job's time limit, {limit}: the job would end without a last checkpoint"
    fix = f"'{format_days(max(1, ends - margin_of(ends)))}' or less, or a longer {key}"
    yield warning(_find_written_key(values, first), written[first], text, fix, also=(key,))


def _find_written_key(values: Values, name: str) -> str:
    """Return the user's key of a time: for NeMo, a launch's configuration has it in the other place."""
    trainers, launches = _MAX_TIMES
    return trainers if name == launches and values.raw(trainers) is None else name


def _max_time_seconds(value: Any) -> int | None:
    """Read Lightning's DD:HH:MM:SS; YAML reads an unquoted one with two parts as a number."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@check("time.training", "a chain of jobs is as long as the training, and that not longer than a year")
def length_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find a chain that is shorter than the training, or a training that is longer than a year.

    Without a chain the limit is not checked: the user's next launch may continue the run.
    """
    cost = estimate_cost(plan, facts.gpu_types)
    if cost is None:
        values, experts = Values(plan.job.config or {}), "model.num_moe_experts"
        model = model_size(values)
        if model is not None and model.has_experts and values.whole(_STEPS) and plan.assumptions.mfu is None:
            why = "the time of experts is not modelled: set estimates.mfu=..."
            yield skip_check("how long the training takes", f"{full(experts)}={values.raw(experts)}: {why}")
        return
    key, links, limit = limit_key(plan), plan.job.chain.links, plan.job.resources.time_limit
    if cost.links is not None and 1 < links < cost.links:
        whole = f"{_length(cost)}, which is {count(cost.links, 'job')}"
        text = f"{count(links, 'job')} of {limit} end before the training does: {whole}"
        fix = f"{_LINKS}={cost.links}, a longer {key}, or more nodes"
        yield warning(_LINKS, links, text, fix, also=(key, _STEPS))
    if cost.seconds > _LONGEST:
        text = f"more than a year: {_length(cost)} for {cost.tokens:,} tokens"
        fix = "fewer steps, or more nodes; estimates.mfu=... where it is known better"
        yield warning(_STEPS, cost.steps, text, fix, also=(NODES,))


def _length(cost: Cost) -> str:
    return f"about {days_text(cost.seconds)} on {count(cost.gpus, 'GPU')} at MFU {cost.mfu:.2f}"


def days_text(seconds: float) -> str:
    """Format a duration: in days, in hours below two days, or in minutes."""
    if seconds < 5400:
        return f"{seconds / 60:.1f} minutes"
    if seconds < 2 * _DAY:
        return f"{seconds / 3600:.1f} hours"
    days = seconds / _DAY
    return f"{days:,.0f} days" if days >= 100 else f"{days:.1f} days"


@check("chain.requeue", "the jobs of a chain are not requeued by Slurm too")
def requeue_problems(plan: Plan) -> Iterator[Finding]:
    """Find a chain that Slurm requeues too: its next job would be ambiguous."""
    queue, links = plan.job.queue, plan.job.chain.links
    by_flag = "requeue" in queue.further
    if links == 1 or (queue.requeue is False and not by_flag):
        return
    key, fix = ("cluster.sbatch.requeue", "null") if by_flag else ("cluster.requeue", "False")
    value = True if by_flag else queue.requeue
    restarts = "may restart, by the site's default," if value is None else "restarts"
    text = f"Slurm {restarts} a job that it ended, and so does the chain of {links} jobs: choose one of them"
    yield error(key, value, text, f"{key}={fix}, or {_LINKS}=1", also=(_LINKS,))


@check("chain.dependency", "the next job of a chain can wait for the one before it")
def dependency_problems(plan: Plan) -> Iterator[Finding]:
    """Find alternatives in the dependency of a chain: its next job must wait for the previous one."""
    dependency, key = plan.job.queue.dependency, f"{plan.job.stage}.run.dependency"
    if plan.job.chain.links > 1 and dependency is not None and "?" in dependency:
        text = "alternatives (?) cannot be waited for together with the job before in a chain"
        yield error(key, dependency, text, f"{key}=singleton", also=(_LINKS,))


@check("chain.resume", "the jobs of a chain, and tasks that start again, go on from checkpoints")
def resume_problems(values: Values, plan: Plan) -> Iterator[Finding]:
    chain = plan.job.chain
    if chain.links > 1:
        text, setting, fix = f"each of the {chain.links} jobs of the chain would begin anew", _LINKS, 1
    elif chain.restarts:
        text, setting, fix = "tasks that start again would begin anew", _RESTARTS, 0
    else:
        return
    for key in _NEEDED:
        if values.raw(key) is False:
            yield error(key, False, text, f"True, or {setting}={fix}", also=(setting,))


@check("time.save", "jobs are signalled to save before they end, and not as soon as they begin")
def save_problems(plan: Plan) -> Iterator[Finding]:
    key, value = limit_key(plan), plan.job.resources.time_limit
    limit, signal = limit_seconds(plan.job.resources.time_limit), plan.job.queue.signal
    match = _SIGNAL.fullmatch(signal or "")
    if match and limit is not None and int(match[1]) >= limit:
        text = f"not less than the time limit, {value}: the job would save as soon as it begins"
        fix = f"less than {limit} seconds, or {_SAVE}=auto; where cluster.signal is set, that is {signal}"
        yield error(_SAVE, int(match[1]), text, fix, also=(key, "cluster.signal"))
    if signal is not None and plan.job.stage == "training" and not _SAVES.fullmatch(signal):
        text = "the training does not save at this signal, which may end it before its last checkpoint"
        fix = f"cluster.signal=USR1{signal[signal.find('@') :] if '@' in signal else '@300'}"
        yield error("cluster.signal", signal, text, fix, also=(_SAVE,))
    if plan.job.chain.links > 1 and limit is None and signal is None:
        text = "without this limit no job of the chain is signalled to save before the partition's limit"
        yield warning(key, value, text, f"{key}=1-00:00:00, or {_SAVE}=300", also=(_LINKS,))


TIMES = (
    *(limit_problems, max_time_problems, length_problems, save_problems),
    *(requeue_problems, dependency_problems, resume_problems, exclude_file_problems),
)
CHECKS = (
    python_problems,
    singleton_problems,
    training_problems,
    shard_problems,
    order_problems,
    data_problems,
)
