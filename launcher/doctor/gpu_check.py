"""A machine's GPUs are checked by small trainings there: the trainer's `gpu_check`, started here or by srun.

The two sides meet in files: this writes the configuration whose throughput is measured, and reads the table.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checks.gathering.gather import gather
from launcher.doctor.gathering import environment_here
from launcher.doctor.nodes import srun_command
from launcher.drafting import Draft
from launcher.errors import UserError
from launcher.estimates.overview import overview
from launcher.images.interrupts import ending_cleanly
from launcher.plan import Plan
from launcher.rendering.config_text import config_text
from launcher.runs.paths import CODE, TASK_PACKAGES
from launcher.runs.write import copy_package
from launcher.slurm.commands import WITHOUT_SLURM
from launcher.stages import common

_MICRO_BATCHES = 4
RESULT, CONFIG = "gpu_check.json", "throughput_config"
STATES = ("passed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check, as the trainer's side writes it."""

    check: str
    state: str
    detail: str
    fix: str | None
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """A machine's table; `estimate` is what `slipway check` says of the configuration that was measured.

    A table that is not `finished` is of checks that were ended on their way, by a time limit for example.
    """

    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    estimate: Mapping[str, Any]
    directory: Path
    finished: bool

    @property
    def ok(self) -> bool:
        """True if all checks ran and none failed."""
        return self.finished and not self.failed

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [row.check for row in self.rows if row.state == "failed"]


def check_gpus(made: Draft, directory: Path, only: str | None, minutes: int) -> Report:
    """Run the checks for a draft, on this machine or on a node of its cluster, and wait for them.

    Parameters
    ----------
    made
        A training with ``engine=megatron``: its interpreter, its nodes, and the model to measure.
    directory
        What the checks write; the node sees it under the same path.
    only
        The names of the checks, with commas between; ``None`` for all.
    minutes
        For how long the job is asked.

    Raises
    ------
    UserError
        If the launch trains nothing with our trainer, or nothing could be started.
    """
    plan = made.plan
    if plan.job.config is None or plan.job.engine != "megatron":
        raise UserError("gpu-check runs our own trainer: stages=[training] and engine=megatron are needed")
    step, environment = _step(plan, minutes), _environment(plan, directory / CODE)
    result = directory / RESULT
    if result.exists() or (directory / CODE).exists():
        raise UserError(f"--directory {directory}: it holds an earlier check: choose another")
    directory.mkdir(parents=True, exist_ok=True)
    # As in a launch, the nodes get what tasks run alone: the launcher's own libraries are not theirs.
    for package in TASK_PACKAGES:
        copy_package(package, directory / CODE / package.name)
    (directory / f"{CONFIG}.yaml").write_text(config_text(plan.job.config), encoding="utf-8")
    python = common.python(made.composition.config)
    command = [python, "-u", "-m", "trainer.gpu_check", "--directory", str(directory)]
    command += ["--config-path", str(directory), "--config-name", CONFIG]
    command += ["--only", only] if only else []
    # `-m` looks into the working directory first, which may be a checkout.
    code = _run([*step, *command], environment, directory / CODE)
    if not result.exists():
        raise UserError(
            f"the checks ended with exit code {code} and without a table: see what they said above"
        )
    return read_report(result, estimate_of(made))


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
    found = []
    if model["global_batch_size"] > most:
        found.append(f"training.model.global_batch_size={most}")
    if model.get("rampup_batch_size"):
        found.append("training.model.rampup_batch_size=null")
    return found


def read_report(result: Path, estimate: Mapping[str, Any]) -> Report:
    """Read the table that the trainer's side wrote.

    Raises
    ------
    UserError
        If it is none.
    """
    try:
        content = json.loads(result.read_text(encoding="utf-8"))
        rows = tuple(Row(**row) for row in content["rows"])
        return Report(content["machine"], rows, estimate, result.parent, content.get("finished") is True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{result}: no table of the checks: {error}") from error


def estimate_of(made: Draft) -> dict[str, Any]:
    """Return what is estimated of the configuration that is measured; nothing of what cannot be told."""
    estimates = overview(made.plan, gather(made, look=False).gpu_types)
    found: dict[str, Any] = {}
    if estimates.memory is not None:
        found["gpu"] = estimates.memory.counted.gpu.name
        found["peak_bytes"] = estimates.memory.fullest.total
    if estimates.cost is not None:
        found["step_seconds"], found["mfu"] = estimates.cost.seconds_per_step, estimates.cost.mfu
    return found


def beside_estimate(row: Row, estimate: Mapping[str, Any]) -> str:
    """Return a row's detail, with what was estimated of it."""
    if "step_seconds" not in row.numbers or not estimate:
        return row.detail
    parts = []
    if "step_seconds" in estimate:
        parts.append(f"{estimate['step_seconds']:.3f} s a step")
    if "peak_bytes" in estimate:
        parts.append(f"peak {estimate['peak_bytes'] / 2**30:.2f} GiB")
    return f"{row.detail}; estimated for {estimate.get('gpu', 'its GPU')}: {', '.join(parts)}"


def _step(plan: Plan, minutes: int) -> list[str]:
    """Return what starts the checks on a node; nothing where they run on this machine."""
    if plan.scheduler == "local":
        return []
    if plan.job.container is not None:
        # The trainer comes from this machine's checkout, which an image need not see.
        raise UserError(
            "gpu-check: container= is not for it yet: it runs the interpreter of the nodes",
            key="container",
            hint="container=null cluster.python=/path/of/python, or cluster=local in a shell of the image",
        )
    wanted = plan.job.resources
    if plan.scheduler != "allocation" and wanted.gpus_per_task and not (wanted.gpus_per_node or wanted.gres):
        raise UserError(
            f"gpu-check: cluster.gpus_per_task={wanted.gpus_per_task} does not tell how many GPUs a node has",
            key="cluster.gpus_per_task",
            hint="cluster.gpus_per_task=null cluster.gpus_per_node=N, where N is the number of a node's GPUs",
        )
    return srun_command(plan, 1, "slipway-gpu-check", minutes, whole_node=True)


def _environment(plan: Plan, code: Path) -> dict[str, str]:
    environment = dict(os.environ) if plan.scheduler == "local" else environment_here(plan)
    # The trainer reads what a site says of its own GPUs as in a job.
    environment |= plan.job.environment
    before = [path] if (path := environment.get("PYTHONPATH")) else []
    return {**environment, "PYTHONPATH": ":".join([str(code), *before])}


def _run(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> int:
    """Run to the end; what is said goes to stderr, as stdout is for the table."""
    try:
        with (
            ending_cleanly(),
            subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
            ) as process,
        ):
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
