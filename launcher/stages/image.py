"""The job that builds or imports an image: the launcher itself, on one node, without GPUs or a container."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import ClusterConfig, RunConfig
from launcher.config.secrets import check_secrets
from launcher.config.stage_schema import RunConfigNode
from launcher.errors import UserError
from launcher.plan import Assumptions, Chain, Job, Payload, Plan
from launcher.stages import common
from launcher.stages.common import WITHOUT_GPUS, stage_cluster

STAGE = "image"

# The package's own directory may be a checkout that the interpreter does not know.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


# Of an image's name in that of its run, which `cluster.job_name_prefix` and the names of logs make longer.
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class ImageWork:
    """The work of the job.

    Attributes
    ----------
    name
        The stem of the image's file: the run is called ``image_<name>``, or nearly so.
    arguments
        What `slipway` is run with, all paths whole: ``("image", "import", ...)``.
    target
        The file that it makes.
    """

    name: str
    arguments: tuple[str, ...]
    target: Path


def image_plan(config: RunConfig, work: ImageWork, *, number: int, tag: str) -> Plan:
    """Plan the job that makes an image. A pure function of its arguments.

    Raises
    ------
    UserError
        If there is no queue for it.
    """
    cluster = image_cluster(config)
    check_secrets(config.model_copy(update={"cluster": cluster}))
    if cluster.scheduler != "slurm":
        raise UserError(
            f"cluster.scheduler={cluster.scheduler}: a job of Slurm's makes an image, or this machine",
            key="cluster.scheduler",
            hint="slipway image build|import without --on-cluster, or launch --build=host",
        )
    node = image_run(config, work)
    paths = common.launch_paths(STAGE, node, cluster, number)
    job = Job(
        stage=STAGE,
        engine=STAGE,
        resources=common.resources(cluster, node, nodes=1, tasks=1),
        queue=common.queue(cluster, node),
        payload=Payload(
            argv=(sys.executable, "-u", "-m", "launcher.cli.app", *work.arguments),
            working_dir=str(paths.directory),
            python_path=(str(_PACKAGE_ROOT),),
        ),
        environment=common.environment(config.model_copy(update={"cluster": cluster})),
        srun_args=tuple(cluster.srun_args),
        merge_stderr=cluster.stderr_to_stdout,
        chain=Chain(exclude_hours=config.resilience.exclude_hours),
    )
    return Plan(paths, tag, cluster.scheduler, cluster.slurm_conf, job, Assumptions())


def image_directory(config: RunConfig, work: ImageWork) -> Path:
    """Return the directory of the run that makes an image."""
    return common.launch_paths(STAGE, image_run(config, work), image_cluster(config), 1).run_dir


def image_run(config: RunConfig, work: ImageWork) -> RunConfigNode:
    """Return the run of an image, whose directory lies beside those of trainings."""
    name = _run_name(work.name)
    return RunConfigNode(
        name=name,
        results_dir=f"{config.base_results_dir}/{name}",
        time_limit=config.image_job.time_limit,
        # Of two that make the same image the second one finds it made.
        dependency="singleton",
    )


def _run_name(image: str) -> str:
    """Return a safe file name for the run of an image, different for each image."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "-", image)[:_LONGEST_NAME]
    which = "" if plain == image else f"-{hashlib.sha256(image.encode()).hexdigest()[:8]}"
    return f"{STAGE}_{plain}{which}"


def image_cluster(config: RunConfig) -> ClusterConfig:
    """Return the cluster as `image_job` and `stage_cluster.image` change it; the latter wins."""
    own = config.stage_cluster.get("image", {})
    requested = {"cpus_per_task": config.image_job.cpus_per_task, "mem": config.image_job.mem}
    changes = {**WITHOUT_GPUS, **{key: value for key, value in requested.items() if value is not None}}
    base = config.cluster.model_copy(update={key: value for key, value in changes.items() if key not in own})
    return stage_cluster(base, STAGE, own)
