"""The conversion stage: weights in one format to weights in another, by one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.late_stages import ConversionConfig
from launcher.config.schema import RunConfig
from launcher.errors import literal, setting_error
from launcher.plan import Job
from launcher.runs.trained import checkpoints_of
from launcher.stages.checkpoint_source import (
    STEP,
    directory_of,
    find_source_training,
    read_configuration,
    require_source,
    tokenizer_directories,
)
from launcher.stages.common import cpu_cluster, cpu_environment, resources, stage_job, trainer_payload
from launcher.stages.nemo import nemo_conversion_job
from launcher.stages.stage import Stage, StageRun, section, training_paths
from slipway.common.sections import TrainedRun

STAGE: Final = "conversion"
# One thread copies tensors; the other loads and writes.
_CORES = 2


def _follow(conversion: ConversionConfig, before: RunConfig) -> ConversionConfig:
    """Return a conversion of the checkpoints of the training before it, if there is one."""
    training = before.training
    if training is None or conversion.source is not None:
        return conversion
    paths = training_paths(before, training)
    return replace(
        conversion,
        source=checkpoints_of(dict(training), paths),
        model=training.model if conversion.model is None else conversion.model,
        model_type=conversion.model_type or training.run.model_type,
        training=conversion.training or TrainedRun(training.run.name, paths.run_dir),
    )


def _complete(config: RunConfig, conversion: ConversionConfig) -> list[RunConfig]:
    """Complete the configuration from the training of the source's run."""
    model = read_configuration(conversion.model, f"{STAGE}.model")
    changes: dict[str, Any] = {"model": model.get("model", model) if model is not None else None}
    training = find_source_training(conversion.source)
    if training is not None and conversion.training is None:
        changes |= {
            "model": changes["model"] or training.config.get("model"),
            "model_type": conversion.model_type or training.model_type,
            "training": TrainedRun(training.manifest.run, training.paths.run_dir),
        }
    return [config.model_copy(update={STAGE: replace(conversion, **changes)})]


def _plan(run: StageRun, conversion: ConversionConfig) -> Job:
    """Plan a conversion: one task on one node, without GPUs.

    Raise UserError if nothing says what to convert, or the engine's own programs would have to.
    """
    require_source(conversion.source, STAGE)
    config, node, readable = run.config, section(run), dict(_readable(conversion))
    if config.engine == "nemo":
        return nemo_conversion_job(run, conversion, node, readable)
    if conversion.to == "nemo":
        raise setting_error(
            f"conversion.to=nemo: engine={config.engine} has no NeMo to make a .nemo file",
            hint="engine=nemo, or conversion=huggingface",
            also=("engine",),
        )
    _check_every(conversion, config.engine)
    output, cluster = directory_of(conversion.output), cpu_cluster(run, cores=_CORES)
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
    output = str(conversion.output)
    if STEP not in output:
        raise setting_error(
            f"conversion.output={literal(output)}: with conversion.every={every} it needs {STEP}",
            hint=f"conversion.output={output}/step-{STEP}",
            also=("conversion.every",),
        )


def _readable(conversion: ConversionConfig) -> Iterator[tuple[Path, str]]:
    """Yield the job's inputs, each with its key."""
    training = conversion.training.directory if conversion.training else None
    paths = {
        "source": conversion.source,
        "tokenizer_dir": conversion.tokenizer_dir,
        "check.text": conversion.check.text,
        "training.directory": training,
    }
    yield from ((path, f"{STAGE}.{key}") for key, path in paths.items() if path is not None)
    if conversion.tokenizer_dir is None and isinstance(conversion.model, Mapping):
        yield from tokenizer_directories(conversion.model)


def _writes(_config: RunConfig, conversion: ConversionConfig) -> list[Path]:
    return [directory_of(conversion.output)]


CONVERSION = Stage(STAGE, ConversionConfig, _plan, split=_complete, follow=_follow, writes=_writes)
