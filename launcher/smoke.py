"""Two steps of a training's real payload on one node, before it is launched on all of them.

The smoke is a launch of the run ``<run>_smoke``, planned from the same overrides and a few more below, and
launched the ordinary way. A mistake that it finds has cost one node and minutes, not a hundred nodes and a
night in the queue.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from launcher.checks.gate import CheckReport, check_drafts, require_passed, show_to_scheduler
from launcher.checks.rules.launch import MACHINE
from launcher.config.overrides import hydra_value
from launcher.drafting import Draft, Request, draft
from launcher.errors import DONE, WATCHING_ENDED, WENT_WRONG, UserError, escape
from launcher.estimates import parallelism as keys
from launcher.estimates.parallelism import is_encoder_decoder, read_parallel_config
from launcher.estimates.values import Values, full
from launcher.jobs.launches import Launch
from launcher.launching import launch
from launcher.monitor.evidence import gather
from launcher.monitor.follow import follow_and_tell
from launcher.monitor.verification import RunVerdict, verify
from launcher.runs.paths import display_path
from launcher.runs.receipts import submitted_jobs
from launcher.slurm.notations import format_days, format_time_limit, margin_of, parse_time_limit
from launcher.ui.tables import print_code
from launcher.ui.terminal import print_message, print_stderr
from slipway.arithmetic.layout import ParallelConfig, fits

# The schedule of a whole training does not fit into a few steps, and need not: its first are the same.
OF_WHOLE_TRAININGS = ("schedule.warmup", "schedule.validation")


@dataclass(frozen=True, slots=True)
class Smoke:
    """A planned smoke, not written yet; `summary` says how it differs from the launch."""

    report: CheckReport
    request: Request
    summary: Sequence[str]

    @property
    def draft(self) -> Draft:
        return self.report.draft


def plan_smoke(drafted: Draft, request: Request, skipped: Sequence[str] = ()) -> Smoke:
    """Plan the smoke of a launch; nothing is written."""
    with drafted.composition.annotated():
        overrides, summary = _shrink(drafted)
    smaller = replace(request, overrides=[*request.overrides, *overrides])
    smoke = draft(smaller)
    # This machine is looked at for the launch itself.
    (report,) = check_drafts([smoke], [*skipped, *OF_WHOLE_TRAININGS, MACHINE])
    require_passed([report])
    return Smoke(report, smaller, summary)


def try_smoke(
    report: CheckReport, request: Request, skipped: Sequence[str], *, dry: bool, is_for_program: bool
) -> tuple[CheckReport, int | None]:
    """Run the smoke of a launch, and say how it went; nothing is written if one of the two would be refused.

    In a dry run print its script. Return the report of the launch with the scheduler's answer, and the exit
    code: None to go on.
    """
    smoke = plan_smoke(report.draft, request, skipped)
    if dry:
        for line in smoke.summary:
            _say(line)
        print_code(smoke.draft.script, "bash")
        return report, DONE
    # The launch itself is judged before its smoke takes its time.
    report = show_to_scheduler(report)
    require_passed([report])
    launched = launch(smoke.draft, smoke.request, report=smoke.report)
    for warning in launched.warnings:
        print_message(warning)
    first, *others = smoke.summary
    for line in (f"run {launched.paths.run_name}, job {launched.manifest.job_id}: {first}", *others):
        _say(line)
    # For a program on stderr, as it reads stdout.
    with contextlib.redirect_stdout(sys.stderr) if is_for_program else contextlib.nullcontext():
        code = follow_and_tell(launched.paths.run_dir, launched.paths.number)
    name = report.draft.plan.paths.run_name
    if code == WATCHING_ENDED:
        _say(f"{name} itself was not launched")
        return report, code
    submitted_jobs.pop(str(launched.manifest.job_id), None)
    return report, None if _has_passed(name, launched, code) else WENT_WRONG


def _has_passed(name: str, launched: Launch, code: int) -> bool:
    """Verify a smoke that ended (`launcher.monitor.verification`), and print its failures."""
    checks = verify(gather(launched.paths.run_dir, launched.paths.number), is_smoke=True)
    failed = [check for check in checks if check.verdict is RunVerdict.FAILED]
    if failed or code:
        for check in failed if code == DONE else ():  # after a failed job, the end of its log was printed
            _say(f"{check.name}: failed: {check.evidence}")
        where = display_path(launched.paths.run_dir)
        _say(f"failed, and {name} was not launched; the files of the smoke test are in {where}")
        return False
    for check in checks:
        if check.verdict is RunVerdict.UNKNOWN:
            _say(f"{check.name}: unknown: {check.evidence}")
    _say(f"passed; launching {name}")
    return True


def drop_smoke(command: Sequence[str]) -> list[str]:
    """Return the command line without `--smoke`, also shortened, for the record of the launch itself."""
    end = command.index("--") if "--" in command else len(command)
    kept = [word for word in command[:end] if not (word.startswith("--s") and "--smoke".startswith(word))]
    return [*kept, *command[end:]]


def _say(line: str) -> None:
    print_stderr(f"smoke: {escape(line)}")


# --- shrinking a training

STEPS = 2
SUFFIX = "_smoke"
_SECONDS = 30 * 60
# Optimizers that share their states among the copies of the model.
_SHARED_STATES = ("mcore_distributed_optim", "distributed_fused_adam")
_FIRST_HOST = re.compile(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?")


def _shrink(draft: Draft) -> tuple[list[str], list[str]]:
    """Return the overrides of a smoke, and its summary; raise UserError if no node holds the training."""
    training, nodes = draft.composition.config.training, draft.plan.job.resources.nodes
    if training is None:
        raise UserError(
            f"--smoke: stages=[{draft.plan.job.stage}] has no steps to try",
            hint="--smoke is for stages=[training]",
        )
    # As the user's tree has it: the job's own configuration is already the engine's.
    config = training.model_dump()
    values = Values(config)
    shape = read_parallel_config(values)
    if shape is None:
        raise UserError("--smoke: the sizes of the layout cannot be read")
    small = _shrink_to_one_node(shape, values)
    batch = small.micro * small.data(1) * shape.micro_batches(nodes)
    overrides = shorten(draft, ShortRun(SUFFIX, 1, STEPS), _model(config, shape, small, batch))
    return overrides, list(_summary(draft, values, shape, small, batch))


class ShortRun(NamedTuple):
    """A short training beside the real one; its first `steps` are those of the whole schedule."""

    suffix: str
    nodes: int
    steps: int
    hosts: str | None = None


def shorten(draft: Draft, short: ShortRun, model: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the overrides of a short run of a training, with some keys of its model changed."""
    assert draft.composition.config.training is not None
    config = draft.composition.config.training.model_dump()
    chosen = dict(chain(_steps(config, draft, short), model))
    return [*(_override(config, key, value) for key, value in chosen.items()), *_restrict_job(draft, short)]


def _shrink_to_one_node(shape: ParallelConfig, values: Values) -> ParallelConfig:
    """Return the layout with as much of its pipeline as fits on one node; each stage keeps its layers."""
    group = shape.tensor * shape.context
    for pipeline in range(shape.pipeline, 0, -1):
        if shape.pipeline % pipeline or shape.devices % (group * pipeline):
            continue
        small = shape._replace(
            pipeline=pipeline,
            virtual=shape.virtual if pipeline > 1 else None,
            group=shape.group if pipeline == shape.pipeline else pipeline,
        )
        if pipeline < shape.pipeline and is_encoder_decoder(values):
            break  # which stages are the encoder's would have to change with them
        if fits(small._replace(batch=small.micro * small.data(1) * small.group), 1):
            return small
    product = f"tensor {shape.tensor} × context {shape.context}"
    raise UserError(
        f"--smoke: one node of {shape.devices} GPUs cannot hold {product} × pipeline {shape.pipeline}",
        key=full(keys.TENSOR),
        also=(full(keys.PIPELINE), full(keys.CONTEXT), full(keys.DEVICES)),
        hint="launch without --smoke; two steps on all nodes are"
        f" {full('trainer.max_steps')}={STEPS} training.run.name=...",
    )


def _steps(config: Mapping[str, Any], draft: Draft, short: ShortRun) -> Iterator[tuple[str, Any]]:
    """Yield the overrides for a few steps, in a separate run next to the real one, with its own directory."""
    paths, trainer, exp_manager = draft.plan.paths, config["trainer"], config["exp_manager"]
    directory = paths.run_dir.with_name(f"{paths.run_dir.name}{short.suffix}")
    yield "run.name", f"{paths.run_name}{short.suffix}"
    yield "run.results_dir", str(directory)
    yield "exp_manager.explicit_log_dir", f"{directory}/results"
    time_limit = draft.plan.job.resources.time_limit
    limit = min(_SECONDS, (parse_time_limit(time_limit) if time_limit else None) or _SECONDS)
    yield "run.time_limit", format_time_limit(limit)
    yield "trainer.max_time", format_days(limit - margin_of(limit))
    if exp_manager.get("max_time_per_run") is not None:
        yield "exp_manager.max_time_per_run", None
    yield "trainer.num_nodes", short.nodes
    yield "trainer.max_steps", short.steps
    yield "trainer.log_every_n_steps", 1
    if trainer.get("limit_val_batches") != 0:
        # One batch: evaluating takes other memory than training, and other files.
        yield "trainer.val_check_interval", short.steps
        yield "trainer.limit_val_batches", 1
    if trainer.get("limit_test_batches"):
        yield "trainer.limit_test_batches", 1
    yield "exp_manager.create_checkpoint_callback", False
    yield "exp_manager.resume_if_exists", False
    if exp_manager.get("create_wandb_logger"):
        yield "exp_manager.create_wandb_logger", False
    if (config.get("resume") or {}).get("checkpoint"):
        yield "resume.checkpoint", None
    if config.get("restore_from_path") is not None:
        # The weights of the whole model would not fit the small one.
        yield "restore_from_path", None


def _model(
    config: Mapping[str, Any], shape: ParallelConfig, small: ParallelConfig, batch: int
) -> Iterator[tuple[str, Any]]:
    model = config["model"]
    yield from scale_batch(config, batch)
    if small.pipeline < shape.pipeline:
        yield keys.PIPELINE, small.pipeline
        yield "model.num_layers", model["num_layers"] * small.pipeline // shape.pipeline
        if shape.virtual is not None and small.virtual is None:
            yield keys.VIRTUAL, None


def scale_batch(config: Mapping[str, Any], batch: int) -> Iterator[tuple[str, Any]]:
    """Yield the changes of a model that trains with another global batch, from the first step on."""
    yield keys.GLOBAL, batch
    for key in ("rampup_batch_size", "resume_from_checkpoint"):
        if config["model"].get(key) is not None:
            yield f"model.{key}", None


def _override(config: Mapping[str, Any], key: str, value: Any) -> str:
    node: Any = config
    for part in key.split("."):
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else _MISSING
    sign = "++" if node is _MISSING else ""
    text = hydra_value(value) if isinstance(value, str) else "null" if value is None else str(value)
    return f"{sign}training.{key}={text}"


_MISSING = object()


def _restrict_job(draft: Draft, short: ShortRun) -> Iterator[str]:
    """Yield overrides for as many named nodes, and no chain or array: their jobs would repeat the steps."""
    job = draft.plan.job
    # The stage's own settings, in place of the cluster's.
    own: Mapping[str, Any] = draft.composition.config.stage_cluster.get("training", {})
    # Slurm requires as many nodes as there are names.
    hosts = short.hosts
    if hosts is None and job.queue.nodelist and (match := _FIRST_HOST.match(job.queue.nodelist)):
        hosts = "".join(part or "" for part in match.groups())
    if hosts is not None:
        where = "stage_cluster.training" if "nodelist" in own else "cluster"
        yield f"{where}.nodelist={hydra_value(hosts)}"
    if job.chain.links > 1:
        yield "resilience.links=1"
    if job.chain.restarts:
        yield "resilience.restarts=0"
    if job.resources.spares:
        # They are refused where nothing replaces a node, and a ramp times the nodes that it chose.
        yield "resilience.spares=0"
    if job.resources.max_nodes is not None:
        yield "resilience.nodes=null"
    if "array" in job.queue.further:
        where = "stage_cluster.training" if "array" in own.get("sbatch", {}) else "cluster"
        yield f"++{where}.sbatch.array=null"


def _summary(
    draft: Draft, values: Values, shape: ParallelConfig, small: ParallelConfig, batch: int
) -> Iterator[str]:
    nodes = draft.plan.job.resources.nodes
    parts = [f"{STEPS} steps on {'the' if nodes == 1 else '1 of'} {nodes} node{'s' * (nodes != 1)}"]
    if batch != shape.batch:
        parts.append(f"global batch {batch} instead of {shape.batch}")
    yield ", ".join(parts)
    if small.pipeline < shape.pipeline:
        layers = values.whole("model.num_layers") or 0
        part = layers * small.pipeline // shape.pipeline
        yield (
            f"pipeline {small.pipeline} instead of {shape.pipeline}, with {part} of the {layers} layers: each"
            " GPU has as many as it will have; the messages between nodes are not tried"
        )
    copies, fewer = shape.data(nodes), small.data(1)
    is_shared = (
        values.raw("model.optim.name") in _SHARED_STATES and values.raw("trainer.accelerator") == "gpu"
    )
    if fewer < copies and is_shared:
        yield (
            f"the optimizer's states are shared by {fewer} instead of {copies}: each GPU needs more memory"
            " for them than it will"
        )
