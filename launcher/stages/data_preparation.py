"""The data preparation stage: text files to a tokenizer and Megatron's .bin/.idx."""

from __future__ import annotations

from pathlib import Path

from launcher.config.schema import RunConfig, TextPreparationConfig
from launcher.plan import Chain, Job, Payload
from launcher.runs.paths import LaunchPaths
from launcher.stages import common
from launcher.stages.containers import container

WITHOUT_GPUS = {
    "gpus_per_node": None,
    "gpus_per_task": None,
    "gres": None,
    "gpu_request": None,
    "exclusive": False,
}


def data_preparation_job(config: RunConfig, text: TextPreparationConfig, paths: LaunchPaths) -> Job:
    """Plan the tokenizing of a text corpus: one task on one node, without GPUs."""
    writable = {
        Path(config.base_results_dir): "base_results_dir",
        paths.run_dir: "data_preparation.run.results_dir",
        Path(text.output_prefix).parent: "data_preparation.output_prefix",
        Path(text.tokenizer_dir): "data_preparation.tokenizer_dir",
    }
    outputs = sorted({Path(text.output_prefix).parent, Path(text.tokenizer_dir)})
    inputs = {Path(path).absolute(): "data_preparation.inputs" for path in text.inputs}
    # What a cluster of GPUs sets for all its jobs; `stage_cluster` may set it for this stage all the same.
    own = config.stage_cluster.get("data_preparation", {})
    cluster = config.cluster.model_copy(
        update={key: value for key, value in WITHOUT_GPUS.items() if key not in own}
    )
    return Job(
        stage="data_preparation",
        engine="megatron",
        resources=common.resources(cluster, text.run, nodes=1, tasks=1),
        queue=common.queue(cluster, text.run),
        payload=Payload(
            argv=(common.python(config), "-u", "-m", "trainer.data.tokenize", *_arguments(text)),
            working_dir=str(paths.code),
            python_path=(str(paths.code),),
        ),
        container=container(config, writable, readable=inputs),
        environment=common.environment(config),
        srun_args=tuple(cluster.srun_args),
        merge_stderr=cluster.stderr_to_stdout,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
        directories=tuple(outputs),
    )


def _arguments(text: TextPreparationConfig) -> list[str]:
    options = text.model_dump(exclude={"run", "inputs"}).items()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options if value is not None]
    return ["--input", *(str(Path(path).absolute()) for path in text.inputs), *flags]
