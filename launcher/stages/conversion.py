"""The conversion stage: weights in one format to weights in another, by one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import ConversionConfig, TrainedRun
from launcher.errors import literal, setting_error
from launcher.plan import Job
from launcher.runs.manifest import checkpoints_of, newest_training
from launcher.stages.checkpoint_source import (
    STEP,
    configuration_of,
    directory_of,
    required_source,
    tokenizer_directories,
)
from launcher.stages.common import cpu_cluster, cpu_environment, resources, stage_job, trainer_payload
from launcher.stages.names_and_paths import make_absolute
from launcher.stages.nemo import nemo_conversion_job
from launcher.stages.stage import Stage, StageRun, training_paths

STAGE: Final = "conversion"
# One thread copies tensors; the other loads and writes.
_CORES = 2


def _follow(conversion: ConversionConfig, before: RunConfig) -> ConversionConfig:
    """Return a conversion of the checkpoints of the training before it, if there is one."""
    training = before.training
    if training is None or conversion.source is not None:
        return conversion
    paths = training_paths(before, training)
    changes = {
        "source": str(checkpoints_of(dict(training), paths)),
        "model": training.model if conversion.model is None else conversion.model,
        "model_type": conversion.model_type or training.run.model_type,
        "training": conversion.training or TrainedRun(run=training.run.name, directory=str(paths.run_dir)),
    }
    return conversion.model_copy(update=changes)


def _with_training(config: RunConfig, conversion: ConversionConfig) -> list[RunConfig]:
    """Return the configuration with what the run of the source says of its training."""
    model = configuration_of(conversion.model, f"{STAGE}.model")
    changes: dict[str, Any] = {"model": model.get("model", model) if model is not None else None}
    training = newest_training(Path(conversion.source)) if conversion.source is not None else None
    if training is not None and conversion.training is None:
        changes |= {
            "model": changes["model"] or training.config.get("model"),
            "model_type": conversion.model_type or training.model_type,
            "training": TrainedRun(run=training.manifest.run, directory=str(training.paths.run_dir)),
        }
    return [config.model_copy(update={STAGE: conversion.model_copy(update=changes)})]


def _plan(run: StageRun, conversion: ConversionConfig) -> Job:
    """Plan a conversion: one task on one node, without GPUs.

    Raise UserError if nothing says what to convert, or the engine's own programs would have to.
    """
    config, node = run.config, _node(conversion)
    readable = dict(_readable(node))
    if config.engine == "nemo":
        return nemo_conversion_job(run, conversion, node, readable)
    if conversion.to == "nemo":
        raise setting_error(
            f"conversion.to=nemo: engine={config.engine} has no NeMo, whose script makes a .nemo file",
            hint="engine=nemo, or conversion=huggingface",
            also=("engine",),
        )
    _check_every(conversion, config.engine)
    output, cluster = directory_of(Path(node["output"])), cpu_cluster(run, cores=_CORES)
    return stage_job(
        run,
        resources(cluster, conversion.run, nodes=1, tasks=1),
        trainer_payload(run, "slipway.trainer.conversion", "run"),
        cluster=cluster,
        variables=cpu_environment(run),
        readable=readable,
        stage_config={STAGE: node},
        directories={output: f"{STAGE}.output"},
    )


def _check_every(conversion: ConversionConfig, engine: str) -> None:
    """Refuse a repeated conversion that would find nothing, or write each result onto the one before."""
    every = conversion.every
    if every is None:
        return
    if engine != "megatron":
        raise setting_error(
            f"conversion.every={every}: checkpoints of engine={engine} are not converted one by one",
            hint="conversion.every=null: the newest one, after the training",
            also=("engine",),
        )
    if STEP not in conversion.output:
        raise setting_error(
            f"conversion.output={literal(conversion.output)}: with conversion.every={every} it needs {STEP}",
            hint=f"conversion.output={conversion.output.rstrip('/')}/step-{STEP}",
            also=("conversion.every",),
        )


def _node(conversion: ConversionConfig) -> dict[str, Any]:
    """Return the node as the job reads it: its paths do not depend on the directory that it starts in."""
    node = conversion.model_dump(exclude={"run"})
    node["source"] = required_source(conversion.source, STAGE)
    make_absolute(node, "source", "output", "tokenizer_dir")
    make_absolute(node["check"], "text")
    return node


def _readable(node: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield what the job reads, with the keys that it comes from."""
    yield Path(node["source"]), f"{STAGE}.source"
    if node["tokenizer_dir"] is not None:
        yield Path(node["tokenizer_dir"]), f"{STAGE}.tokenizer_dir"
    elif isinstance(node["model"], Mapping):
        yield from tokenizer_directories(node["model"])
    if node["check"]["text"] is not None:
        yield Path(node["check"]["text"]), f"{STAGE}.check.text"
    if node["training"] is not None:
        yield Path(node["training"]["directory"]), f"{STAGE}.training.directory"


def _writes(_config: RunConfig, conversion: ConversionConfig) -> list[Path]:
    return [directory_of(Path(conversion.output).absolute())]


CONVERSION = Stage(STAGE, ConversionConfig, _plan, split=_with_training, follow=_follow, writes=_writes)
