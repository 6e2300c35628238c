"""The data preparation stage: raw sources to tokens, as a single job or as three that follow each other.

The three are launches of runs of their own, ``NAME_fetch``, ``NAME`` (the job array) and ``NAME_merge``: each
has a log, a state and a history that the verbs about jobs show, and can be launched again alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import DataPreparationConfig, SourceConfig
from launcher.errors import setting_error
from launcher.plan import Job, Queue
from launcher.stages.common import cpu_cluster, cpu_environment, resources, stage_job, trainer_payload
from launcher.stages.names_and_paths import make_absolute
from launcher.stages.stage import Stage, StageRun
from slipway.arithmetic.globs import split_glob

STAGE: Final = "data_preparation"
# The parts, in their order, with what is added to the name of the run.
PHASES = {"fetch": "_fetch", "tokenize": "", "merge": "_merge"}

# The option of a filter that names the file of a model.
_MODEL = "model"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def _by_phase(config: RunConfig, preparation: DataPreparationConfig) -> list[RunConfig]:
    """Return one configuration for each job: several for an array of tasks.

    Without a queue in which a job could wait, a single process does the work of all tasks.
    """
    if preparation.phase is not None:
        return [_of_phase(config, preparation, preparation.phase)]
    if preparation.tasks == 1 or config.cluster.scheduler != "slurm":
        return [config]
    return [_of_phase(config, preparation, phase) for phase in PHASES]


def _of_phase(config: RunConfig, preparation: DataPreparationConfig, phase: str) -> RunConfig:
    run, suffix = preparation.run, PHASES[phase]
    changes: dict[str, Any] = {"name": f"{run.name}{suffix}"}
    if suffix:
        changes["results_dir"] = f"{run.results_dir.rstrip('/')}{suffix}"
    if preparation.phase is None and phase != "fetch":
        changes["dependency"] = None  # what the first part waits for, the others wait for with it
    own = preparation.model_copy(update={"phase": phase, "run": run.model_copy(update=changes)})
    return config.model_copy(update={STAGE: own})


def _plan(run: StageRun, preparation: DataPreparationConfig) -> Job:
    """Plan a preparation, or a part of it: one task on one node, or an array of such, without GPUs."""
    outputs: dict[Path, str | None] = {Path(preparation.output_prefix).parent: f"{STAGE}.output_prefix"}
    outputs.setdefault(Path(preparation.work_dir).parent, f"{STAGE}.work_dir")
    outputs.setdefault(Path(preparation.tokenizer_dir), f"{STAGE}.tokenizer_dir")
    readable = {directory_of(path): f"{STAGE}.inputs" for path in local_inputs(preparation)}
    if preparation.tokenizer.file is not None:
        readable[Path(preparation.tokenizer.file).absolute()] = f"{STAGE}.tokenizer.file"
    readable |= dict.fromkeys(_filter_models(preparation), f"{STAGE}.filters")
    cluster = cpu_cluster(run, cores=preparation.workers)
    payload = trainer_payload(
        run, "slipway.corpus", preparation.phase or "run", options=_options(preparation)
    )
    job = stage_job(
        run,
        resources(cluster, preparation.run, nodes=1, tasks=1),
        replace(payload, array_key="--task" if _is_array(preparation) else None),
        cluster=cluster,
        variables=cpu_environment(run),
        readable=readable,
        stage_config={STAGE: _absolute(preparation)},
        directories=outputs,
    )
    return replace(job, queue=_queue(job.queue, preparation))


def _is_array(preparation: DataPreparationConfig) -> bool:
    return preparation.phase == "tokenize" and preparation.tasks > 1


def _queue(queue: Queue, preparation: DataPreparationConfig) -> Queue:
    """Return the queue options, with the array of tasks if there is one."""
    array = queue.further.get("array")
    if preparation.phase is not None and array is not None:
        raise setting_error(
            f"cluster.sbatch.array={array}: data_preparation.tasks={preparation.tasks} is an array already",
            also=("data_preparation.tasks",),
        )
    if not _is_array(preparation):
        return queue
    return replace(queue, further={**queue.further, "array": f"0-{preparation.tasks - 1}"})


def _options(preparation: DataPreparationConfig) -> list[str]:
    if preparation.phase != "tokenize":
        return []
    return [f"--tasks={preparation.tasks}", *([] if _is_array(preparation) else ["--task=0"])]


def _absolute(preparation: DataPreparationConfig) -> dict[str, Any]:
    """Return the node as the job reads it: its paths do not depend on the directory that it starts in."""
    node = preparation.model_dump(exclude={"run"})
    node["inputs"] = [_absolute_source(source) for source in preparation.inputs]
    node["filters"] = [_absolute_filter(entry) for entry in preparation.filters]
    make_absolute(node, "output_prefix", "work_dir", "tokenizer_dir")
    make_absolute(node["tokenizer"], "file")
    return node


def _absolute_source(source: str | SourceConfig) -> str | dict[str, Any]:
    if isinstance(source, str):
        return source if _URL.match(source) else str(Path(source).absolute())
    node = source.model_dump(exclude_none=True)
    if source.path is not None:
        node["path"] = _absolute_source(source.path)
    return node


def _absolute_filter(entry: str | Mapping[str, Mapping[str, Any]]) -> str | dict[str, dict[str, Any]]:
    """Return a filter with the absolute path of its model."""
    if isinstance(entry, str):
        return entry
    return {
        name: {key: str(Path(value).absolute()) if key == _MODEL else value for key, value in options.items()}
        for name, options in entry.items()
    }


def _filter_models(preparation: DataPreparationConfig) -> Iterator[Path]:
    """Yield the files of the models that filters classify with."""
    for entry in preparation.filters:
        for options in entry.values() if not isinstance(entry, str) else ():
            if _MODEL in options:
                yield Path(options[_MODEL]).absolute()


def local_inputs(preparation: DataPreparationConfig) -> Iterator[Path]:
    """Yield the sources that are files, directories or globs, as absolute paths."""
    for source in preparation.inputs:
        text = source if isinstance(source, str) else source.path
        if text is not None and not _URL.match(text):
            yield Path(text).absolute()


def directory_of(path: Path) -> Path:
    """Return the directory above the first wildcard of a glob, or the path itself without one."""
    return Path(split_glob(str(path))[0])


def _writes(_config: RunConfig, preparation: DataPreparationConfig) -> Iterator[Path]:
    prefix = preparation.output_prefix
    yield from (Path(prefix), Path(preparation.tokenizer_dir))
    yield from (Path(f"{prefix}_{split}") for split in preparation.splits or ())


DATA_PREPARATION = Stage(STAGE, DataPreparationConfig, _plan, split=_by_phase, writes=_writes)
