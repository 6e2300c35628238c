"""The conversion stage: weights in one format to weights in another, by one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import ConversionConfig, TrainedRun, TrainingConfig
from launcher.errors import UserError, shown
from launcher.plan import Chain, Job, Payload
from launcher.runs.paths import LaunchPaths
from launcher.runs.trained import checkpoints_of
from launcher.stages import common
from launcher.stages.checkpoint_source import (
    STEP,
    directory_of,
    required_source,
    tokenizer_directories,
)
from launcher.stages.containers import container
from launcher.stages.nemo_conversion import nemo_conversion_job

STAGE: Final = "conversion"
# One thread copies tensors; the other loads and writes.
_CORES = 2
_PATHS = ("source", "output", "tokenizer_dir")


def behind_training(
    conversion: ConversionConfig, training: TrainingConfig, paths: LaunchPaths
) -> ConversionConfig:
    """Return a conversion with the checkpoints and the model of the training that goes before it.

    Parameters
    ----------
    paths
        Those of any launch of the training.
    """
    if conversion.source is not None:
        return conversion
    changes = {
        "source": str(checkpoints_of(dict(training), paths)),
        "model": training.model if conversion.model is None else conversion.model,
        "model_type": conversion.model_type or training.run.model_type,
        "training": conversion.training or TrainedRun(run=training.run.name, directory=str(paths.run_dir)),
    }
    return conversion.model_copy(update=changes)


def conversion_job(config: RunConfig, conversion: ConversionConfig, paths: LaunchPaths) -> Job:
    """Plan a conversion: one task on one node, without GPUs.

    Raises
    ------
    UserError
        If nothing says what to convert, or the engine's own programs would have to.
    """
    node = _node(conversion)
    if config.engine == "nemo":
        return nemo_conversion_job(config, conversion, node, dict(_readable(node)), paths)
    if conversion.to == "nemo":
        raise UserError(
            f"conversion.to=nemo: engine={config.engine} has no NeMo, whose script makes a .nemo file",
            key="conversion.to",
            also=("engine",),
            hint="engine=nemo, or conversion=huggingface",
        )
    _check_every(conversion, config.engine)
    output = directory_of(Path(node["output"]))
    writable = {
        Path(config.base_results_dir): "base_results_dir",
        paths.run_dir: f"{STAGE}.run.results_dir",
        output: f"{STAGE}.output",
    }
    cluster = common.cpu_cluster(config, STAGE, cores=_CORES)
    return Job(
        stage=STAGE,
        engine="megatron",
        resources=common.resources(cluster, conversion.run, nodes=1, tasks=1),
        queue=common.queue(cluster, conversion.run),
        payload=Payload(
            argv=(
                common.python(config),
                *("-u", "-m", "trainer.conversion", "run"),
                *common.config_arguments(paths),
            ),
            working_dir=str(paths.code),
            python_path=(str(paths.code),),
        ),
        container=container(config, writable, readable=dict(_readable(node))),
        stage_config={STAGE: node},
        environment=common.cpu_environment(config, STAGE),
        srun_args=tuple(cluster.srun_args),
        merge_stderr=cluster.stderr_to_stdout,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
        directories=(output,),
    )


def _check_every(conversion: ConversionConfig, engine: str) -> None:
    """Refuse a repeated conversion that would find nothing, or write each result onto the one before."""
    every = conversion.every
    if every is None:
        return
    if engine != "megatron":
        raise UserError(
            f"conversion.every={every}: checkpoints of engine={engine} are not converted one by one",
            key="conversion.every",
            also=("engine",),
            hint="conversion.every=null: the newest one, after the training",
        )
    if STEP not in conversion.output:
        raise UserError(
            f"conversion.output={shown(conversion.output)}: with conversion.every={every} it needs {STEP}",
            key="conversion.output",
            also=("conversion.every",),
            hint=f"conversion.output={conversion.output.rstrip('/')}/step-{STEP}",
        )


def _node(conversion: ConversionConfig) -> dict[str, Any]:
    """Return the node as the job reads it: its paths do not depend on the directory that it starts in."""
    node = conversion.model_dump(exclude={"run"})
    node["source"] = required_source(conversion.source, STAGE)
    for key in _PATHS:
        if node[key] is not None:
            node[key] = str(Path(node[key]).absolute())
    if node["check"]["text"] is not None:
        node["check"]["text"] = str(Path(node["check"]["text"]).absolute())
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
