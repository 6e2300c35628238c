"""The arguments of srun, Pyxis' included."""

from __future__ import annotations

from launcher.errors import UserError
from launcher.plan import Container, Job, Mount


def srun_arguments(job: Job) -> list[str]:
    """What srun is told beyond what it takes from the allocation."""
    arguments = ["--kill-on-bad-exit=1"]  # one dead rank would leave the others waiting for ever
    if job.resources.cpus_per_task is not None:
        # From 22.05 on srun does not take it over from sbatch.
        arguments.append(f"--cpus-per-task={job.resources.cpus_per_task}")
    if job.container is None:
        # The site's arguments are Pyxis' in most trees, and Pyxis need not be there without a container.
        return arguments + [text for text in job.srun_args if "container" not in text]
    return arguments + _pyxis(job.container) + list(job.srun_args)


def _pyxis(container: Container) -> list[str]:
    mounts = ",".join(_mount(mount) for mount in container.mounts)
    return [f"--container-image={container.image}", f"--container-mounts={mounts}"]


def _mount(mount: Mount) -> str:
    for path in (mount.source, mount.target):
        if "," in path or ":" in path:
            raise UserError(f"{path!r} cannot be mounted: Pyxis separates mounts with ',' and ':'")
    return ":".join(part for part in (mount.source, mount.target, mount.flags) if part)
