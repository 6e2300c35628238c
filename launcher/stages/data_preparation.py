"""The data preparation stage: raw sources to tokens, as a single job or as three that follow each other.

The three are launches of the runs ``NAME_fetch``, ``NAME`` (the job array) and ``NAME_merge``: each has its
log, state and history for the verbs about jobs, and can be launched again alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.late_stages import DataPreparationConfig
from launcher.config.schema import RunConfig
from launcher.errors import setting_error
from launcher.plan import Job, Queue
from launcher.stages.common import cpu_cluster, cpu_environment, resources, stage_job, trainer_payload
from launcher.stages.stage import Stage, StageRun, section
from slipway.arithmetic.globs import split_glob
from slipway.common.sections import Input, Phase

STAGE: Final = "data_preparation"
# The parts, in their order, with the suffix of the run's name.
PHASES: dict[Phase, str] = {"fetch": "_fetch", "tokenize": "", "merge": "_merge"}

# The option of a filter that names the file of a model.
_MODEL = "model"


def _split_phases(config: RunConfig, preparation: DataPreparationConfig) -> list[RunConfig]:
    """Return one configuration for each job: several for an array of tasks.

    Without a queue, a single process does the work of all tasks.
    """
    if preparation.phase is not None:
        return [_configure_phase(config, preparation, preparation.phase)]
    if preparation.tasks == 1 or config.cluster.scheduler != "slurm":
        return [config]
    return [_configure_phase(config, preparation, phase) for phase in PHASES]


def _configure_phase(config: RunConfig, preparation: DataPreparationConfig, phase: Phase) -> RunConfig:
    run, suffix = preparation.run, PHASES[phase]
    changes: dict[str, Any] = {"name": f"{run.name}{suffix}"}
    if suffix:
        changes["results_dir"] = f"{run.results_dir.rstrip('/')}{suffix}"
    if preparation.phase is None and phase != "fetch":
        changes["dependency"] = None  # the others wait for the first part
    own = replace(preparation, phase=phase, run=run.model_copy(update=changes))
    return config.model_copy(update={STAGE: own})


def _plan(run: StageRun, preparation: DataPreparationConfig) -> Job:
    """Plan a preparation, or a part of it: one task on one node, or an array of such, without GPUs."""
    outputs: dict[Path, str | None] = {preparation.output_prefix.parent: f"{STAGE}.output_prefix"}
    outputs.setdefault(preparation.work_dir.parent, f"{STAGE}.work_dir")
    outputs.setdefault(preparation.tokenizer_dir, f"{STAGE}.tokenizer_dir")
    readable = {directory_of(path): f"{STAGE}.inputs" for path in local_inputs(preparation)}
    if preparation.tokenizer.file is not None:
        readable[preparation.tokenizer.file] = f"{STAGE}.tokenizer.file"
    models = (Path(entry.options[_MODEL]) for entry in preparation.filters if _MODEL in entry.options)
    readable |= dict.fromkeys(models, f"{STAGE}.filters")
    cluster = cpu_cluster(run, cores=preparation.workers)
    payload = trainer_payload(
        run, "slipway.corpus", preparation.phase or "run", options=_options(preparation)
    )
    job = stage_job(
        run,
        resources(cluster, preparation.run, nodes=1, tasks=1),
        payload._replace(array_key="--task" if _is_array(preparation) else None),
        cluster=cluster,
        variables=cpu_environment(run),
        readable=readable,
        stage_config={STAGE: _node(run, preparation)},
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


def _node(run: StageRun, preparation: DataPreparationConfig) -> dict[str, Any]:
    """Return the node as the job reads it: its paths do not depend on the directory that it starts in."""
    inputs = [replace(entry, path=str(path)) if path else entry for entry, path in entries(preparation)]
    return {**section(run), "inputs": [entry.to_config() for entry in inputs]}


def entries(preparation: DataPreparationConfig) -> Iterator[tuple[Input, Path | None]]:
    """Yield the inputs, each with its absolute path if it is no address."""
    for entry in preparation.inputs:
        yield entry, Path(entry.path).absolute() if entry.path and "://" not in entry.path else None


def local_inputs(preparation: DataPreparationConfig) -> Iterator[Path]:
    """Yield the sources that are files, directories or globs, as absolute paths."""
    return (path for _, path in entries(preparation) if path)


def directory_of(path: Path) -> Path:
    """Return the directory above the first wildcard of a glob, or the path itself without one."""
    return Path(split_glob(str(path))[0])


def data_sets_of(preparation: DataPreparationConfig) -> list[Path]:
    """Return the prefixes of the data sets that a preparation writes: one, or one for each split."""
    prefix = preparation.output_prefix
    return [Path(f"{prefix}_{split}") for split in preparation.splits or ()] or [prefix]


def _writes(_config: RunConfig, preparation: DataPreparationConfig) -> list[Path]:
    return [preparation.output_prefix, preparation.tokenizer_dir, *data_sets_of(preparation)]


DATA_PREPARATION = Stage(STAGE, DataPreparationConfig, _plan, split=_split_phases, writes=_writes)
