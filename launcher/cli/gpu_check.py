"""`slipway gpu-check`: check what the GPUs of a machine compute, before a training relies on them."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.cli.options import Verbs, add_option
from launcher.cli.requests import add_examining_verb, request_of
from launcher.config.stored import config_text
from launcher.doctor.examination import environment_here
from launcher.doctor.nodes import srun_command
from launcher.drafting import Draft, draft
from launcher.errors import DONE, WENT_WRONG, UserError, escape
from launcher.estimates.cost import overview
from launcher.images.tools import ending_cleanly
from launcher.plan import Plan
from launcher.runs.paths import CODE, PACKAGE
from launcher.runs.write import copy_package
from launcher.slurm.commands import WITHOUT_SLURM
from launcher.slurm.questions import ask_at_once
from launcher.stages import common
from launcher.ui.terminal import print_json

_HELP = """\
Check what the GPUs of a machine compute, by small trainings with engine=megatron: versions, GPU against CPU,
bf16 against fp32, each layout that there are GPUs for against one GPU, a training that is killed and resumed,
with the peak memory of a save, and the throughput of one model beside its estimate. With cluster=local the
checks run here, else on one whole node of the cluster, by srun, in the interpreter of the nodes
(cluster.python): the cluster's container is not used. Without a GPU it says so, and runs what a CPU can:
docs/gpu.md.

examples:
  slipway gpu-check cluster=local                            this machine
  slipway gpu-check cluster=bcm cluster.partition=gpu        one node of the cluster
  slipway gpu-check cluster=local training=llama/llama3_8b training.trainer.devices=8   the model to measure
  slipway gpu-check cluster=local --only versions,devices    a minute
  slipway gpu-check cluster=local --json | jq -r '.rows[] | select(.state == "failed") | .fix'

exit code:
  0  all checks ran, and none failed
  1  a check failed, or the checks were ended before the last
  2  a mistake in the arguments, or nothing could be started
"""

_MINUTES = 60
_OURS = (
    "training=gpt3/126m",
    "engine=megatron",
    "training.trainer.num_nodes=1",
    "training.trainer.devices=1",
    # The checks run in the interpreter of the nodes.
    "container=null",
)


def add_parser(verbs: Verbs) -> None:
    parser = add_examining_verb(verbs, "gpu-check", run, _HELP, "such as cluster=local")
    add_option(parser, "--only CHECK,...", "some of the checks: versions, devices, parity, ...")
    text = "the directory of their files (default: gpu_check/DATE in base_results_dir)"
    add_option(parser, "--directory DIR", text)
    text = f"the time limit of the job (default: {_MINUTES})"
    add_option(parser, "--minutes N", text, default=_MINUTES)


def run(args: argparse.Namespace) -> int:
    if args.minutes < 1:
        raise UserError(f"--minutes {args.minutes}: a number of minutes, from 1 on")
    names = {text.partition("=")[0] for text in args.overrides}

    def drafted(extra: Sequence[str]) -> Draft:
        # The user's own overrides win.
        ours = [text for text in (*_OURS, *extra) if text.partition("=")[0] not in names]
        return draft(request_of(args, [*ours, *args.overrides]))

    launch = drafted(())
    batch = batch_overrides(launch.plan.job.config)
    if batch:
        # The measured batch and the estimated one are the same.
        launch = drafted(batch)
    results = Path(launch.composition.config.base_results_dir)
    default = results / "gpu_check" / f"{datetime.now():%Y%m%d-%H%M%S}"
    report = check_gpus(launch, (args.directory or default).absolute(), args.only, args.minutes)
    if args.json:
        print_json({"ok": report.ok, **asdict(report), "directory": str(report.directory)})
    else:
        print("\n".join(table(report)))
    return DONE if report.ok else WENT_WRONG


def table(report: GpuReport) -> Iterator[str]:
    """Yield the table's lines: a check, its state, and below a failed one its remedy."""
    width = max((len(row.check) for row in report.rows), default=0)
    for row in report.rows:
        yield f"{row.check:{width}}  {row.state:7}  {escape(beside_estimate(row, report.estimate))}"
        if row.state == "failed" and row.fix:
            yield f"{'':{width}}  {'':7}  -> {escape(row.fix)}"
    counts = {state: sum(row.state == state for row in report.rows) for state in STATES}
    yield f"{', '.join(f'{count} {state}' for state, count in counts.items())}; {_verdict(report)}"
    yield f"all that they wrote: {report.directory}"


def _verdict(report: GpuReport) -> str:
    if not report.finished:
        return "FAILED: the checks were ended before the last of them: see what they said above"
    if report.failed:
        return f"fix first: {', '.join(report.failed)}"
    if not report.machine.get("gpus"):
        return "no GPU was checked: this is the half that a CPU can do"
    return "the GPUs compute what they should, as far as these checks see: docs/gpu.md has what they do not"


# --- running the checks

_MICRO_BATCHES = 4
RESULT, CONFIG = "gpu_check.json", "throughput_config"
STATES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check, as the trainer's side writes it."""

    check: str
    state: str
    detail: str
    fix: str | None
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """A machine's table; `estimate` is that of `slipway check` for the measured configuration.

    Without `finished` the checks ended before the last of them, by a time limit for example.
    """

    finished: bool
    machine: Mapping[str, Any]
    rows: tuple[CheckResult, ...]
    estimate: Mapping[str, Any]
    directory: Path

    @property
    def ok(self) -> bool:
        """True if all checks ran and none failed."""
        return self.finished and not self.failed

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [row.check for row in self.rows if row.state == "failed"]


def check_gpus(draft: Draft, directory: Path, only: str | None, minutes: int) -> GpuReport:
    """Run the checks for a draft, on this machine or on a node of its cluster, and wait for them.

    The draft is a training with ``engine=megatron``: its interpreter, its nodes, and the model to measure.
    The node sees `directory` under the same path; `only` names checks, with commas between; None is all.
    Raise UserError if the launch trains nothing with our trainer, or nothing could be started.
    """
    plan = draft.plan
    if plan.job.config is None or plan.job.engine != "megatron":
        raise UserError("gpu-check runs our own trainer: stages=[training] and engine=megatron are needed")
    step = _step(plan, minutes)
    environment = dict(os.environ) if plan.scheduler == "local" else environment_here(plan)
    # The trainer reads a site's own GPUs as in a job.
    environment |= plan.job.environment
    paths = filter(None, [str(directory / CODE), environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = ":".join(paths)
    result = directory / RESULT
    if result.exists() or (directory / CODE).exists():
        raise UserError(f"--directory {directory}: it holds an earlier check: choose another")
    directory.mkdir(parents=True, exist_ok=True)
    # As in a launch, nodes get that package alone: the launcher's libraries are not theirs.
    copy_package(PACKAGE, directory / CODE / PACKAGE.name)
    (directory / f"{CONFIG}.yaml").write_text(config_text(plan.job.config), encoding="utf-8")
    python = common.python(draft.composition.config)
    command = [python, "-u", "-m", "slipway.trainer.gpu_check", "--directory", str(directory)]
    command += ["--config-path", str(directory), "--config-name", CONFIG]
    command += ["--only", only] if only else []
    # `-m` looks into the working directory first, which may be a checkout.
    code = _run([*step, *command], environment, directory / CODE)
    if not result.exists():
        message = f"the checks ended with exit code {code} and without a table"
        raise UserError(f"{message}: see what they said above")
    return read_report(result, estimate_of(draft))


def batch_overrides(config: Mapping[str, Any] | None) -> list[str]:
    """Return the overrides by which a step takes a few micro batches, as a whole one may take minutes.

    With pipeline stages it takes a multiple of theirs, which virtual stages need.
    """
    if config is None or "model" not in config:
        return []  # no training, which check_gpus refuses
    model, keys = config["model"], ("tensor_model", "pipeline_model", "context")
    tensor, pipeline, context = (model.get(f"{key}_parallel_size") or 1 for key in keys)
    data = max(1, config["trainer"]["devices"] // (tensor * pipeline * context))
    most = model["micro_batch_size"] * data * pipeline * math.ceil(_MICRO_BATCHES / pipeline)
    overrides = []
    if model["global_batch_size"] > most:
        overrides.append(f"training.model.global_batch_size={most}")
    if model.get("rampup_batch_size"):
        overrides.append("training.model.rampup_batch_size=null")
    return overrides


def read_report(result: Path, estimate: Mapping[str, Any]) -> GpuReport:
    """Read the table that the trainer's side wrote; raise UserError if it is no such table."""
    try:
        content = json.loads(result.read_text(encoding="utf-8"))
        rows = tuple(CheckResult(**row) for row in content["rows"])
        return GpuReport(content.get("finished") is True, content["machine"], rows, estimate, result.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{result}: no table of the checks: {error}") from error


def estimate_of(draft: Draft) -> dict[str, Any]:
    """Return the estimates of the measured configuration, without unknown ones."""
    estimates = overview(draft.plan)
    values: dict[str, Any] = {}
    if estimates.memory is not None:
        values["gpu"] = estimates.memory.counted.gpu.name
        values["peak_bytes"] = estimates.memory.fullest.total
    if estimates.cost is not None:
        values["step_seconds"], values["mfu"] = estimates.cost.seconds_per_step, estimates.cost.mfu
    return values


def beside_estimate(row: CheckResult, estimate: Mapping[str, Any]) -> str:
    """Return a row's detail with its estimates."""
    if "step_seconds" not in row.numbers or not estimate:
        return row.detail
    parts = []
    if "step_seconds" in estimate:
        parts.append(f"{estimate['step_seconds']:.3f} s a step")
    if "peak_bytes" in estimate:
        parts.append(f"peak {estimate['peak_bytes'] / 2**30:.2f} GiB")
    return f"{row.detail}; estimated for {estimate.get('gpu', 'its GPU')}: {', '.join(parts)}"


def _step(plan: Plan, minutes: int) -> list[str]:
    """Return the command that starts the checks on a node; none where they run on this machine."""
    if plan.scheduler == "local":
        return []
    if plan.job.container is not None:
        # The trainer comes from this machine's checkout, which an image need not see.
        raise UserError(
            "gpu-check: container= is not for it yet: it runs the interpreter of the nodes",
            key="container",
            hint="container=null cluster.python=/path/of/python, or cluster=local in a shell of the image",
        )
    resources = plan.job.resources
    per_node = resources.gpus_per_node or resources.gres
    if plan.scheduler != "allocation" and resources.gpus_per_task and not per_node:
        raise UserError(
            f"gpu-check: cluster.gpus_per_task={resources.gpus_per_task} leaves the GPUs of a node open",
            key="cluster.gpus_per_task",
            hint="cluster.gpus_per_task=null cluster.gpus_per_node=N, where N is the number of a node's GPUs",
        )
    no_slurm = ask_at_once({"settings": ["scontrol", "show", "config"]}, plan.slurm_conf)["settings"].why
    if no_slurm is not None:
        raise UserError(no_slurm, hint=WITHOUT_SLURM)
    return srun_command(plan, 1, "slipway-gpu-check", minutes, whole_node=True)


def _run(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> int:
    """Run to the end; its output goes to stderr, as stdout is for the table."""
    options: dict[str, Any] = {"env": environment, "cwd": cwd, "stdin": subprocess.DEVNULL}
    try:
        with ending_cleanly(), subprocess.Popen(command, stdout=sys.stderr.fileno(), **options) as process:
            try:
                return process.wait()
            except BaseException:
                process.terminate()
                # It ends its own trainings first.
                process.wait()
                raise
    except OSError as error:
        hint = WITHOUT_SLURM if command[0] == "srun" else None
        raise UserError(f"{command[0]}: {error.strerror}", hint=hint) from error
