"""The command that runs a task in a container where srun has no Pyxis."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.plan import Container, Job, Mount
from supervisor.settings import IMAGE

# Of the site's arguments of srun, the one that says what `mount_home: null` does not.
_NO_HOME = "--no-container-mount-home"


def apptainer_command(job: Job, container: Container) -> list[str]:
    """Return the command between srun and the task's script."""
    image = IMAGE if container.is_staged else container.image
    return ["apptainer", "exec", *_options(job, container), image, *_entrypoint(container)]


def _options(job: Job, container: Container) -> Iterator[str]:
    options = container.options
    # Without GPUs on the node it warns, and goes on.
    yield "--nv"
    # The directory where the user stood at launch is none of the job's.
    home = options.mount_home if options.mount_home is not None else _NO_HOME not in job.srun_args
    yield f"--no-mount={'cwd' if home else 'home,cwd'}"
    yield f"--pwd={options.workdir or '/'}"
    if options.writable:
        yield "--writable-tmpfs"  # a squashfs cannot be written: what is written goes with the task
    if options.remap_root:
        yield "--fakeroot"
    for mount in container.mounts:
        yield f"--bind={_bind(mount)}"


def _bind(mount: Mount) -> str:
    """Apptainer knows of Pyxis' flags the two that say whether it can be written."""
    flags = (mount.flags or "").split("+")
    return f"{mount.source}:{mount.target}{':ro' if 'ro' in flags else ''}"


def _entrypoint(container: Container) -> list[str]:
    """Return the script in which an imported image keeps its entry point, as Enroot runs it."""
    return ["/bin/sh", "/etc/rc"] if container.options.entrypoint else []
