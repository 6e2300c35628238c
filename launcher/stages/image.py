"""The job that builds or imports an image: the launcher itself, on one node, without GPUs or a container."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.config.stage_schema import RunConfigNode
from launcher.errors import setting_error
from launcher.plan import Job, Payload
from launcher.runs.paths import PACKAGE
from launcher.stages.common import drop_gpus, resources, stage_job
from launcher.stages.stage import StageRun, prepare, stage_changes

STAGE = "image"

# Most characters of an image's name in that of its run; the prefix of jobs and the names of logs lengthen it.
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class ImageWork:
    """The work of the job: `slipway` with `arguments` (with absolute paths) makes `target`.

    `name` is the stem of the file: the run is called ``image_<name>``, or nearly so. It is planned as a stage
    is, see `launcher.stages.stage.Stage`.
    """

    name: str
    arguments: tuple[str, ...]
    target: Path

    def prepare(self, config: RunConfig, number: int) -> StageRun:
        """Prepare a launch that makes an image; its run's directory lies next to those of trainings.

        `stage_cluster.image` wins over the job's own changes to the cluster.
        """
        name = _run_name(self.name)
        node = RunConfigNode(
            name=name,
            results_dir=f"{config.base_results_dir}/{name}",
            time_limit=config.image_job.time_limit,
            # The second of two jobs for the same image finds it there.
            dependency="singleton",
        )
        requested = {"cpus_per_task": config.image_job.cpus_per_task, "mem": config.image_job.mem}
        changes = {
            **drop_gpus(config.cluster),
            **{key: value for key, value in requested.items() if value is not None},
        }
        own = stage_changes(config, STAGE)
        cluster = config.cluster.model_copy(
            update={key: value for key, value in changes.items() if key not in own}
        )
        # The launcher itself runs in it, outside of the trainings' container.
        changed = config.model_copy(update={"cluster": cluster, "container": None})
        return prepare(STAGE, node, changed, number)

    def job(self, run: StageRun) -> Job:
        """Plan the job that makes an image; raise UserError if there is no queue for it."""
        cluster = run.config.cluster
        if cluster.scheduler != "slurm":
            raise setting_error(
                f"cluster.scheduler={cluster.scheduler}: a job of Slurm's makes an image, or this machine",
                hint="slipway image build|import without --on-cluster, or launch --build=host",
            )
        argv = (sys.executable, "-u", "-m", "launcher.cli.app", *self.arguments)
        # The packages' directory may be a checkout that the interpreter does not know.
        payload = Payload(argv, str(run.paths.directory), python_path=(str(PACKAGE.parent),))
        return stage_job(run, resources(cluster, run.node, nodes=1, tasks=1), payload, engine=STAGE)


def _run_name(image: str) -> str:
    """Return a safe file name for the run of an image, different for each image."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "-", image)[:_LONGEST_NAME]
    which = "" if plain == image else f"-{hashlib.sha256(image.encode()).hexdigest()[:8]}"
    return f"{STAGE}_{plain}{which}"
