"""The evaluation stage: a checkpoint measured on held-out data by our trainer, and on tasks of lm-eval."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.late_stages import EvaluationConfig
from launcher.config.schema import RunConfig, parse
from launcher.config.stage_schema import TrainerNode
from launcher.errors import UserError, setting_error
from launcher.plan import Job
from launcher.runs.paths import LaunchPaths
from launcher.runs.trained import checkpoints_of
from launcher.stages.checkpoint_source import (
    STEP,
    directory_of,
    find_source_training,
    read_configuration,
    require_source,
    tokenizer_directories,
)
from launcher.stages.common import (
    cpu_cluster,
    cpu_environment,
    request_gpu_per_task,
    resources,
    stage_job,
    trainer_payload,
)
from launcher.stages.stage import Stage, StageRun, section, training_paths
from launcher.stages.training import launch_config, reads_data_dir

STAGE: Final = "evaluation"

# Keys of the layout, each with the training's key of the same size.
_PARALLEL = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
# Slurm's default is one core, and reading data takes one by itself.
_CORES = 2


def _complete(config: RunConfig, evaluation: EvaluationConfig) -> list[RunConfig]:
    """Complete the configuration from the training of the source's run."""
    changes: dict[str, Any] = {"training": read_configuration(evaluation.training, f"{STAGE}.training")}
    training = find_source_training(evaluation.source)
    if training is not None:
        changes = {
            "training": changes["training"] or dict(training.config),
            "results": evaluation.results or training.paths.evaluations,
        }
    return [config.model_copy(update={STAGE: replace(evaluation, **changes)})]


def _follow(evaluation: EvaluationConfig, before: RunConfig) -> EvaluationConfig:
    """Return an evaluation of the checkpoints of the training before it, and of the converted model."""
    changes: dict[str, Any] = {}
    training, conversion = before.training, before.conversion
    if training is not None:
        paths = training_paths(before, training)
        changes = {
            "source": evaluation.source or checkpoints_of(dict(training), paths),
            "training": evaluation.training or launch_config(before, training, paths),
            "results": evaluation.results or paths.evaluations,
        }
    if conversion is not None and conversion.to == "huggingface":
        changes["converted"] = evaluation.converted or conversion.output
    return replace(evaluation, **changes)


def _plan(run: StageRun, evaluation: EvaluationConfig) -> Job:
    """Plan an evaluation: as many tasks as the model's layout needs.

    Raise UserError if the source or its training is not given, our trainer cannot read it, or its nodes do
    not share the tasks evenly.
    """
    config, paths = run.config, run.paths
    if config.engine != "megatron":
        raise setting_error(
            f"engine={config.engine}: our own trainer evaluates, with engine=megatron",
            hint="without this stage; NeMo's own evaluation: stages=[command] with its script (docs/nemo.md)",
            also=("stages",),
        )
    node, training = _node(run, evaluation), _training(evaluation, paths)
    trainer = parse(TrainerNode, training["trainer"], f"{STAGE}.training.trainer")
    on_gpus = _runs_on_gpus(node, training)
    node["lm_eval"]["device"] = node["lm_eval"]["device"] or ("cuda" if on_gpus else "cpu")
    nodes, tasks = _tasks(evaluation.processes, _processes(node, training["model"]), trainer.devices)
    cluster = config.cluster if on_gpus else cpu_cluster(run, cores=None)
    cores = evaluation.cpus_per_task or cluster.cpus_per_task or _CORES
    cluster = cluster.model_copy(update={"cpus_per_task": cores})
    requested = resources(cluster, evaluation.run, nodes=nodes, tasks=tasks)
    outputs: dict[Path, str | None] = {Path(node["results"]): f"{STAGE}.results"}
    outputs.setdefault(directory_of(Path(node["converted"])), f"{STAGE}.converted")
    return stage_job(
        run,
        request_gpu_per_task(requested) if on_gpus else requested,
        trainer_payload(run, "slipway.trainer.evaluation", "run"),
        cluster=cluster,
        variables=None if on_gpus else cpu_environment(run),
        readable=dict(_readable(config, node, training)),
        stage_config={**training, STAGE: node},
        directories=outputs,
    )


def _node(run: StageRun, evaluation: EvaluationConfig) -> dict[str, Any]:
    require_source(evaluation.source, STAGE)
    node = section(run)
    del node["training"]
    converted = Path(evaluation.run.results_dir, "huggingface", f"step-{STEP}").absolute()
    return {
        **node,
        "results": node["results"] or str(run.paths.evaluations.absolute()),
        "converted": node["converted"] or str(converted),
    }


def _training(evaluation: EvaluationConfig, paths: LaunchPaths) -> dict[str, Any]:
    """Return the configuration of the training, with this job's own directory of logs."""
    key = f"{STAGE}.training"
    if not isinstance(evaluation.training, Mapping):
        raise setting_error(
            f"{key}: nothing says how {evaluation.source} was trained",
            hint=f"{key}=results/RUN/launches/N/RUN_hydra.yaml",
            also=(f"{STAGE}.source",),
        )
    training = copy.deepcopy(dict(evaluation.training))
    for name in ("trainer", "exp_manager", "model"):
        if not isinstance(training.get(name), dict):
            raise UserError(f"{key}.{name}: missing in the configuration of a training", key=key)
    if not isinstance(training["model"].get("data"), dict):
        raise UserError(f"{key}.model.data: missing in the configuration of a training", key=key)
    training["exp_manager"]["explicit_log_dir"] = str(paths.results)
    return training


def _runs_on_gpus(node: Mapping[str, Any], training: Mapping[str, Any]) -> bool:
    lm_eval, trained_on_gpus = node["lm_eval"], training["trainer"].get("accelerator", "gpu") != "cpu"
    if node["perplexity"]["enabled"] and trained_on_gpus:
        return True
    return bool(lm_eval["tasks"]) and (lm_eval["device"] or ("cuda" if trained_on_gpus else "cpu")) == "cuda"


def _processes(node: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return the number of processes that hold one copy of the model."""
    if not node["perplexity"]["enabled"]:
        return 1
    layout = node["perplexity"]["layout"]
    sizes = (layout[name] or model.get(key) or 1 for name, key in _PARALLEL.items())
    return math.prod(size if isinstance(size, int) else 1 for size in sizes)


def _tasks(processes: int | None, replica: int, devices: int) -> tuple[int, int]:
    """Return the nodes, and the tasks of each, for a number of processes; None is one copy of the model."""
    total = processes or replica
    nodes = -(-total // devices)
    if total % nodes:
        key = f"{STAGE}.processes"
        even = (n for n in itertools.count(total) if n % replica == 0 and n % -(-n // devices) == 0)
        raise setting_error(
            f"{key}={total}: {nodes} nodes of {devices} processes do not share them evenly",
            hint=f"{key}={next(even)}",
            also=(f"{STAGE}.perplexity.layout",),
        )
    return nodes, total // nodes


def _readable(
    config: RunConfig, node: Mapping[str, Any], training: Mapping[str, Any]
) -> Iterator[tuple[Path, str]]:
    """Yield the job's inputs, each with its key."""
    yield Path(node["source"]), f"{STAGE}.source"
    if reads_data_dir(config, training):
        yield Path(config.data_dir), "data_dir"
    yield from tokenizer_directories(training["model"])
    lm_eval = node["lm_eval"]
    if lm_eval["include_path"] is not None:
        yield Path(lm_eval["include_path"]), f"{STAGE}.lm_eval.include_path"
    for name in lm_eval["tasks"]:
        if Path(name).is_absolute():
            yield Path(name).parent, f"{STAGE}.lm_eval.tasks"


EVALUATION = Stage(STAGE, EvaluationConfig, _plan, split=_complete, follow=_follow)
